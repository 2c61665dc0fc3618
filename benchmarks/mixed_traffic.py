"""Short prompts that keep coming: with graphs for the steps that hold them, and with these steps launched.

Two engines of one process, one of which has no sizes for mixed steps, so that it launches them kernel by kernel, serve
the same requests by turns; who goes first changes with each round. All requests wait from the start, so that a prompt
enters whenever one of the rows is free. Every graph is captured beforehand. Figures are medians over the rounds, and
the ratios are of tokens/s::

    python benchmarks/mixed_traffic.py --preset llama-3.1-8b --out mixed_traffic.json
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gapless.bench.figures import RunFigures, percentile
from gapless.bench.measured_engine import MeasuredEngine
from gapless.bench.report import environment
from gapless.bench.workloads import Lengths, Workload, synthetic_workload
from gapless.config import EngineConfig


def make_engine(preset: str, config: EngineConfig, *, graphs: bool) -> MeasuredEngine:
    """An engine whose mixed steps are replayed, or launched."""
    if graphs:
        return MeasuredEngine(preset, config)
    with patch("gapless.engine.step_buckets.mixed_buckets", lambda most: ()):
        return MeasuredEngine(preset, config)


def figures(run: RunFigures, engine: MeasuredEngine) -> dict[str, Any]:
    """What is compared of a run."""
    steps = engine.last_run().steps
    mixed = [step for step in steps if step.num_prefill_tokens]
    return {
        "tokens_per_s": run.output_tokens_per_s,
        "device_active": run.active_share,
        "steps": run.num_steps,
        "mixed_share_of_steps": len(mixed) / len(steps),
        "replayed_share_of_mixed": sum(step.launch == "graph" for step in mixed) / max(len(mixed), 1),
        "itl_p50_ms": 1e3 * (percentile(run.times_s("itl_s"), 50) or 0.0),
        "itl_p99_ms": 1e3 * (percentile(run.times_s("itl_s"), 99) or 0.0),
        "idle_ms": {cause: 1e3 * seconds for cause, seconds in run.steps.idle_s.items() if seconds},
    }


def medians(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each number; the idle times of the last round."""
    return {
        name: statistics.median(each[name] for each in rounds) if name != "idle_ms" else rounds[-1][name]
        for name in rounds[0]
    }


def compare(engines: dict[str, MeasuredEngine], workload: Workload, rounds: int) -> dict[str, Any]:
    """Let the engines serve a workload by turns."""
    for engine in engines.values():
        engine.warm_up(workload)
        engine.run(workload, repeat=0)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for index in range(rounds):
        order = list(engines) if index % 2 else list(reversed(engines))
        for name in order:
            run = engines[name].run(workload, repeat=index + 1)
            found[name].append(figures(run, engines[name]))
    pairs = zip(found["graphs"], found["launched"], strict=True)
    return {
        "workload": workload.name,
        **{name: medians(each) for name, each in found.items()},
        "ratio": statistics.median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs),
    }


def main() -> None:
    """Compare both for each length of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompt", type=int, nargs="+", default=[24, 64, 128, 256], help="mean tokens; +- 50 %")
    parser.add_argument("--new-tokens", type=int, default=64, help="mean; +- 50 %")
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(
        depth=args.depth,
        device=args.device,
        load_format="dummy",
        max_rows=args.rows,
        max_model_len=2048,
        num_blocks=args.rows * 128,
        enable_prefix_caching=False,
    )
    results = []
    with (
        make_engine(args.preset, config, graphs=True) as graphs,
        make_engine(args.preset, config, graphs=False) as launched,
    ):
        for prompt in args.prompt:
            workload = synthetic_workload(
                requests=args.requests,
                prompt=Lengths(mean=prompt, spread=0.5),
                new=Lengths(mean=args.new_tokens, spread=0.5),
                vocab_size=graphs.built.loaded.spec.vocab_size,
                streams=True,
            )
            results.append(compare({"graphs": graphs, "launched": launched}, workload, args.rounds))
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        document = {"environment": environment(torch.device(args.device)), "preset": args.preset, "results": results}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
