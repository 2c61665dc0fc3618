"""What sampling costs in a decode step: greedy, all filters, penalties, and the filters the way of a full sort.

256 requests with prompts that share nothing, on a model with random weights; one engine runs every variant in turn, and
each step with all rows decoding is timed on the device, from after its last stream wait to the end of its last kernel.
The median is compared with the greedy one's. The clock on the wall, between collected steps, stands beside it.
``full sort`` draws with the plain version that sorts the vocabulary, as engines commonly do::

    python benchmarks/gpu_sampling.py --preset llama-3.1-8b --rows 256 --prompt 1024 --out sampling.json
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_overlap import Collector, environment, run

from gapless.config import EngineConfig
from gapless.engine.assembly import build_engine
from gapless.engine.request import EngineRequest
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.graphs import GraphedStep
from gapless.pipeline.ring import CollectedStep, Ring
from gapless.sampling.drawing import Draw, draw_tokens
from gapless.sampling_params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}
FILTERS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 50}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "temperature": {"temperature": 0.8},
    "temperature, top_p, top_k": FILTERS,
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {**GREEDY, **PENALTIES},
    "penalties and filters": {**FILTERS, **PENALTIES},
    "log-probs": {**GREEDY, "logprobs": 5},
    "full sort": FILTERS,
}


@dataclass
class StepTimes:
    """Device and wall time of the steps in which every row decodes."""

    rows: int
    busy_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    last_s: float = 0.0

    def note(self, step: CollectedStep) -> None:
        """Look at a step that was collected."""
        now_s = time.perf_counter()
        if len(step.batch.entries) == len(step.batch.input_ids) == self.rows:
            self.busy_s.append(step.result.busy_s)
            self.wall_s.append(now_s - self.last_s)
        self.last_s = now_s


def requests_of(vocab_size: int, args: argparse.Namespace, options: dict[str, Any]) -> list[EngineRequest]:
    """Prompts that share no prefix; seeds are fixed."""
    return [
        EngineRequest(
            prompt_token_ids=[(i * 7919 + index * 104_729 + 1) % vocab_size for i in range(args.prompt)],
            params=SamplingParams(**options, seed=index, max_tokens=args.new_tokens),
        )
        for index in range(args.rows)
    ]


def set_draw(step: DeviceStep | GraphedStep, draw: Draw) -> Draw:
    """Let the engine's sampler draw in another way; returns the way before. Reaches into private state."""
    inner = step._step if isinstance(step, GraphedStep) else step
    before = inner._sampler._draw_tokens
    inner._sampler._draw_tokens = draw
    return before


def main() -> None:
    """Run every variant and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    collector = Collector()
    context = args.prompt + args.new_tokens
    config = EngineConfig(
        depth=args.depth,
        device=args.device,
        load_format="dummy",
        max_rows=args.rows,
        max_model_len=context,
        num_blocks=args.rows * -(-context // 16) + 64,
        token_budget=8192,
        enable_prefix_caching=False,
    )
    built = build_engine(args.preset, config, collector)
    collect = Ring.collect
    times = StepTimes(args.rows)

    def noted(ring: Ring) -> CollectedStep:
        step = collect(ring)
        times.note(step)
        return step

    Ring.collect = noted  # type: ignore[method-assign]
    results: dict[str, Any] = {}
    try:
        for name in args.variants:
            assert isinstance(built.executor, DeviceStep | GraphedStep)
            usual = set_draw(built.executor, draw_tokens) if name == "full sort" else None
            requests = requests_of(built.loaded.spec.vocab_size, args, VARIANTS[name])
            run(built, collector, [requests_of(built.loaded.spec.vocab_size, args, VARIANTS[name])[0]])
            times.busy_s, times.wall_s = [], []
            run(built, collector, requests)
            if usual is not None:
                set_draw(built.executor, usual)
            # The first steps capture graphs and take memory.
            busy, wall = times.busy_s[8:], times.wall_s[8:]
            results[name] = {
                "steps": len(busy),
                "device_ms": statistics.median(busy) * 1e3,
                "wall_ms": statistics.median(wall) * 1e3,
            }
            greedy = results.get("greedy", results[name])["device_ms"]
            results[name]["over_greedy"] = results[name]["device_ms"] / greedy - 1
            print(name, json.dumps(results[name]), flush=True)
    finally:
        Ring.collect = collect  # type: ignore[method-assign]
        built.engine.shutdown()
    if args.out is not None:
        settings = {name: str(value) for name, value in vars(args).items()}
        args.out.write_text(
            json.dumps({"environment": environment(args.device), "settings": settings, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
