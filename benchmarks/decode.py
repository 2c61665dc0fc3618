"""Steady decode with random weights: `gapless bench decode`, under the flags of the results that are committed.

Prints for each depth the seconds, the milliseconds of a step, the device-active share and the share of the roofline,
and what they say; fails if the depths' tokens differ::

    python benchmarks/decode.py --preset llama-3.1-8b --requests 32 --prompt 256 --new-tokens 8192 --out decode.json
"""

import argparse
from pathlib import Path

import torch
from rich.console import Console

from gapless.bench.comparison import compare_depths
from gapless.bench.model_facts import read_model_facts
from gapless.bench.plan import make_plan
from gapless.bench.progress import BenchProgress
from gapless.bench.report import comparison_report, write_report
from gapless.bench.tables import depth_table
from gapless.bench.verdict import tokens_verdict, verdict
from gapless.bench.workloads import Lengths, synthetic_workload


def main() -> int:
    """Measure each depth; fail if their tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    facts = read_model_facts(args.preset, "dummy")
    workload = synthetic_workload(
        requests=args.requests,
        prompt=Lengths(mean=args.prompt),
        new=Lengths(mean=args.new_tokens),
        vocab_size=facts.vocab_size,
    )
    plan = make_plan(
        model=args.preset,
        context=facts.context,
        workloads=[workload],
        depths=args.depth,
        repeats=args.repeats,
        seed=0,
        max_rows=None,
        max_model_len=None,
        engine={
            "device": args.device,
            "dtype": args.dtype,
            "load_format": "dummy",
            "block_size": 16,
            "enable_prefix_caching": False,
        },
    )
    with BenchProgress() as progress:
        comparison = compare_depths(plan, progress)
    Console(highlight=False, width=160).print(depth_table(comparison, workload))
    print("\n".join([*verdict(comparison, workload).lines, tokens_verdict(comparison)]), flush=True)
    if args.out:
        write_report(args.out, comparison_report(comparison, torch.device(args.device)))
    comparison.check_tokens()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
