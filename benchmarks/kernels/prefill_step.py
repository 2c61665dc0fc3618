"""Steps with prompts as the engine runs them: their share of the matrix rate, and their kernels.

    PYTHONPATH=src python benchmarks/kernels/prefill_step.py --profile --json prefill.json

The idea: a step of thousands of prompt tokens is bound by the tensor cores, whose rate hangs on the device's power
limit: an H200 that multiplies for longer than a moment lowers its clock. So the bound is measured beside it: after
seconds of warming up, steps and products of 8192 x 8192 x 8192 random numbers take turns, and the share compares the
two at the same clocks. What counts as a step's operations is its products and its attention's visible pairs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from decode_step import BLOCK_SIZE, Bench, kernel_times
from torch.nn import functional as F

from gapless.bench.report import environment
from gapless.layers.forward_inputs import ForwardInputs
from gapless.model.kv_cache import KVCache
from gapless.model.runner import ModelRunner

SIZE = 8192
PRODUCTS = 24  # in a row: about as long as a step
WARM_UP_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step to time: new tokens, and context with them, of each entry."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


STEPS = (
    Step(name="8 prompts of 1024", query_lens=(1024,) * 8, seq_lens=(1024,) * 8),
    Step(name="1 prompt of 8192", query_lens=(8192,), seq_lens=(8192,)),
    Step(name="2048 tokens more for a context of 30720", query_lens=(2048,), seq_lens=(32768,)),
    Step(name="2 prompts of 1024", query_lens=(1024,) * 2, seq_lens=(1024,) * 2),
    Step(
        name="a prompt of 512, 31 decodes at 2048",
        query_lens=(512,) + (1,) * 31,
        seq_lens=(512,) + (2048,) * 31,
    ),
)


def forward_inputs(step: Step, device: torch.device) -> ForwardInputs:
    """The step's inputs over a cache that holds its contexts one after another, behind the reserved block."""
    queries, lens = torch.tensor(step.query_lens), torch.tensor(step.seq_lens)
    blocks = -(-max(step.seq_lens) // BLOCK_SIZE)
    tables = 1 + torch.arange(len(lens) * blocks).view(len(lens), blocks)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0)))
    rows = torch.arange(len(lens)).repeat_interleave(queries)
    positions = torch.arange(len(rows)) - starts[rows] + (lens - queries)[rows]
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return ForwardInputs(
        input_ids=torch.randint(0, 32000, (len(rows),), device=device),
        positions=positions.to(device),
        slot_mapping=slots.to(device),
        query_starts=starts.int().to(device),
        seq_lens=lens.int().to(device),
        rows=torch.arange(len(lens), dtype=torch.int32, device=device),
        block_tables=tables.int().to(device),
        logits_indices=(starts[1:] - 1).to(device),
        host_query_lens=step.query_lens,
        host_seq_lens=step.seq_lens,
    )


def operations(bench: Bench, step: Step) -> int:
    """Multiplications and additions: layers' products for every token, the head's for one an entry, and attention's."""
    spec = bench.spec
    weights = sum(linear.shape.numel() for layer in bench.model.layers for linear in layer.linears)
    pairs = sum(q * (2 * n - q + 1) // 2 for q, n in zip(step.query_lens, step.seq_lens, strict=True))
    attention = 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
    return 2 * weights * sum(step.query_lens) + 2 * bench.model.head.shape.numel() * len(step.seq_lens) + attention


def taking_turns(works: dict[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median milliseconds of each work, which run one after another on a device that is warm."""
    begun = time.monotonic()
    while time.monotonic() - begun < WARM_UP_S:
        for work in works.values():
            work()
        torch.cuda.synchronize()
    spans = []
    for _ in range(repeats):
        for name, work in works.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            spans.append((name, begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for of, begin, end in spans if of == name) for name in works
    }


@torch.inference_mode()
def time_step(bench: Bench, step: Step, *, repeats: int, profile: bool) -> dict[str, Any]:
    """A step's time, its rate, and its share of the rate of large products beside it."""
    num_blocks = len(step.seq_lens) * -(-max(step.seq_lens) // BLOCK_SIZE)
    runner = ModelRunner(
        bench.model, KVCache(bench.shape, num_blocks=num_blocks, block_size=BLOCK_SIZE, device=bench.device)
    )
    inputs = forward_inputs(step, bench.device)
    square = torch.randn((2, SIZE, SIZE), dtype=bench.dtype, device=bench.device)

    def products() -> None:
        for _ in range(PRODUCTS):
            F.linear(square[0], square[1])

    ms = taking_turns({"step": lambda: runner.forward(inputs), "products": products}, repeats=repeats)
    spans = []
    for _ in range(repeats):
        begun = time.perf_counter()
        runner.forward(inputs)
        spans.append(time.perf_counter() - begun)
        torch.cuda.synchronize()
    host_ms = statistics.median(spans) * 1e3
    rate = operations(bench, step) / ms["step"] / 1e9
    bound = PRODUCTS * 2 * SIZE**3 / ms["products"] / 1e9
    found: dict[str, Any] = {
        "step": step.name,
        "ms": round(ms["step"], 3),
        "host_ms": round(host_ms, 3),
        "tflop_s": round(rate, 1),
        "matrix_rate_beside_it_tflop_s": round(bound, 1),
        "share_of_matrix_rate": round(rate / bound, 4),
    }
    print(json.dumps(found), flush=True)
    if profile:
        found["kernels"] = kernel_times(lambda: runner.forward(inputs))
        for row in found["kernels"][:8]:
            print("   {step_us:10.1f} us  {per_step:6.1f} x {median_us:8.2f}  {kernel:.60}".format(**row), flush=True)
    return found


def main() -> None:
    """Time every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="list the kernels")
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    bench = Bench(options.model, max_context=max(max(step.seq_lens) for step in STEPS))
    results = [time_step(bench, step, repeats=options.repeats, profile=options.profile) for step in STEPS]
    if options.json:
        found = {"environment": environment(bench.device), "results": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
