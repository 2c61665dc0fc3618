"""What the timeline costs: the same steady decode with it and without, in turn.

Two engines of one process, one with ``timeline=True``, run the same requests by turns, and who goes first changes with
each round, so that clocks and neighbours are the same for both. The cost is the median over rounds of one minus the
ratio of tokens/s. Since a percent is less than the noise of most machines, the time that the engine's thread spends in
the recorder is measured as well, call by call: ``enqueued`` runs while the device works, the rest is on the critical
path at depth 1::

    python benchmarks/recorder_overhead.py --preset llama-3.1-8b --device cuda --out recorder_overhead.json
"""

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from gpu_overlap import Collector, environment, run, times_ms

from gapless.config import EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.request import EngineRequest
from gapless.sampling_params import SamplingParams
from gapless.timeline.recorder import TimelineRecorder

HIDDEN = ("enqueued",)
CRITICAL = ("scheduling", "writing", "enqueueing", "mark", "waiting", "collected", "applied")


class Engine:
    """An engine and who waits for its answers."""

    def __init__(self, args: argparse.Namespace, depth: int, *, timeline: bool) -> None:
        self.collector = Collector()
        context = args.prompt + args.new_tokens
        config = EngineConfig(
            depth=depth,
            device=args.device,
            load_format="dummy",
            max_model_len=context,
            max_rows=args.requests,
            num_blocks=args.requests * (-(-context // 16) + 1),
            enable_prefix_caching=False,
            timeline=timeline,
        )
        self.built: BuiltEngine = build_engine(args.preset, config, self.collector)
        vocab_size = self.built.loaded.spec.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=args.new_tokens)
        self._requests = [
            EngineRequest(
                prompt_token_ids=[(i * 7919 + index * 104_729 + 1) % vocab_size for i in range(args.prompt)],
                params=params,
            )
            for index in range(args.requests)
        ]

    def tokens_per_s(self) -> float:
        """One run."""
        start_s = time.perf_counter()
        outputs = run(self.built, self.collector, self._requests)
        return sum(map(len, outputs)) / (time.perf_counter() - start_s)


def call_times_us(engine: Engine) -> dict[str, float]:
    """Microseconds a step in each of the recorder's calls, over one run of an engine with a timeline.

    A call counts with the median, so that being interrupted by another process is not the recorder's cost.
    """
    with ExitStack() as stack:
        times = {name: stack.enter_context(times_ms(TimelineRecorder, name)) for name in (*CRITICAL, *HIDDEN)}
        before = engine.built.engine.counters().steps
        engine.tokens_per_s()
        steps = engine.built.engine.counters().steps - before
    return {name: round(statistics.median(spent) * len(spent) / steps * 1e3, 3) for name, spent in times.items()}


def measure(args: argparse.Namespace, depth: int) -> dict[str, Any]:
    """Alternate at one depth."""
    engines = {choice: Engine(args, depth, timeline=choice == "on") for choice in ("off", "on")}
    rates: dict[str, list[float]] = {"off": [], "on": []}
    try:
        for engine in engines.values():
            engine.tokens_per_s()  # compiles, and captures graphs
        for number in range(args.rounds):
            for choice in ("off", "on") if number % 2 == 0 else ("on", "off"):
                rates[choice].append(engines[choice].tokens_per_s())
        timeline = engines["on"].built.engine.timeline
        assert timeline is not None
        clock_error_s = timeline.recording().clock_error_s
        calls_us = call_times_us(engines["on"])
    finally:
        for engine in engines.values():
            engine.built.engine.shutdown()
    costs = [1 - on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "depth": depth,
        "tokens_per_s_off": [round(rate, 1) for rate in rates["off"]],
        "tokens_per_s_on": [round(rate, 1) for rate in rates["on"]],
        "cost": round(statistics.median(costs), 5),
        "cost_quartiles": [round(value, 5) for value in statistics.quantiles(costs, n=4)],
        "step_ms": round(args.requests / statistics.median(rates["on"]) * 1e3, 4),
        "critical_us_a_step": round(sum(calls_us[name] for name in CRITICAL), 3),
        "hidden_us_a_step": round(sum(calls_us[name] for name in HIDDEN), 3),
        "calls_us_a_step": calls_us,
        "clock_error_us": round(clock_error_s * 1e6, 3),
    }


def main() -> int:
    """Measure each depth and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="at least 2")
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for depth in args.depth:
        results.append(measure(args, depth))
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps(results[-1]), flush=True)
    if args.out:
        workload = {key: value for key, value in vars(args).items() if key not in ("out", "depth")}
        found = {"environment": environment(args.device), "workload": workload, "runs": results}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
