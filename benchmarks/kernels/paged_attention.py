"""Paged attention at the shapes of Llama-3.1-8B: time, and share of the read bandwidth measured in the same run.

    PYTHONPATH=src python benchmarks/kernels/paged_attention.py --json attention.json

The idea: each setting is captured in a CUDA graph with one layer after another, every layer with a cache of its own, so
that small contexts do not come from L2 and launches cost what they cost in a decode step. The median replay over the
number of layers is the time of a layer, the making of the work list included. A setting counts only if its result
agrees with the fp32 reference. ``--quick`` times the default settings alone.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor

from gapless.bench.report import environment
from gapless.kernels.attention_tiles import TileShape, default_decode_tile, default_prefill_tile
from gapless.kernels.dependent_launch import has_dependent_launch
from gapless.kernels.paged_attention import TritonAttention, paged_attention_reference
from gapless.layers.forward_inputs import ForwardInputs
from gapless.timeline.roofline import measure_read_bandwidth

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
MAX_LAYERS = 32
CACHE_BYTES = 1 << 30  # layers are added until their caches hold this much, many times the L2
MAX_ERROR = 8e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step to time: new tokens and context of each entry."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V in one layer that must be read at least once."""
        return 2 * sum(self.seq_lens) * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two products, of visible pairs only."""
        pairs = sum(q * (2 * n - q + 1) // 2 for q, n in zip(self.query_lens, self.seq_lens, strict=True))
        return 4 * pairs * NUM_HEADS * HEAD_DIM


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A case on the device: inputs, and for each layer its queries and cache."""

    inputs: ForwardInputs
    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    expected: Tensor  # of layer 0, fp32


def decode_case(name: str, seq_lens: list[int]) -> Case:
    return Case(name=name, query_lens=(1,) * len(seq_lens), seq_lens=tuple(seq_lens))


def all_cases() -> list[Case]:
    grid = [(1, 4096), (1, 32768), (8, 4096), (32, 256), (32, 1024), (32, 4096), (32, 4352), (32, 8192)]
    grid += [(128, 2048), (256, 2048), (256, 8192)]
    cases = [decode_case(f"{batch}x{context}", [context] * batch) for batch, context in grid]
    spread = [64 + (16384 - 64) * ((i * 37) % 64) ** 2 // 63**2 for i in range(64)]
    cases.append(decode_case("64 ragged 64..16384", spread))
    cases.append(decode_case("31x1024 + 1x65536", [1024] * 31 + [65536]))
    cases.append(decode_case("255x512 + 1x131072", [131072] + [512] * 255))
    cases += [
        Case(name="prefill 1x8192", query_lens=(8192,), seq_lens=(8192,)),
        Case(name="prefill 16x512", query_lens=(512,) * 16, seq_lens=(512,) * 16),
        Case(name="chunk 2048 of 32768", query_lens=(2048,), seq_lens=(32768,)),
        Case(name="chunk 64 of 32768", query_lens=(64,), seq_lens=(32768,)),
        Case(name="32x4096 + chunk 1024", query_lens=(*(1,) * 32, 1024), seq_lens=(*(4096,) * 32, 2048)),
    ]
    return cases


def decode_settings(*, quick: bool) -> list[tuple[TileShape, int]]:
    """Tiles, and programs wanted on each multiprocessor; the default first."""
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    default = (default_decode_tile(HEAD_DIM, DTYPE, shared_memory_bytes=shared), 1)
    if quick:
        return [default]
    shapes = [(64, 4, 5), (64, 4, 3), (64, 8, 5), (128, 4, 3), (128, 8, 3), (128, 8, 5), (256, 8, 2), (32, 2, 7)]
    tiles = [TileShape(rows=16, keys=k, num_warps=w, num_stages=s) for k, w, s in shapes]
    every = [(tile, programs) for tile in tiles for programs in (1, 2, 3, 4)]
    return [default, *(setting for setting in every if setting != default)]


def prefill_settings(*, quick: bool) -> list[tuple[TileShape, int]]:
    default = (default_prefill_tile(HEAD_DIM, DTYPE), 1)
    if quick:
        return [default]
    shapes = [(128, 64, 8, 5), (128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 5), (128, 128, 8, 3), (64, 128, 4, 3)]
    every = [(TileShape(rows=r, keys=k, num_warps=w, num_stages=s), 1) for r, k, w, s in shapes]
    return [default, *(setting for setting in every if setting != default)]


def make_problem(case: Case, block_size: int) -> Problem:
    device, count = "cuda", len(case.seq_lens)
    used = [-(-n // block_size) for n in case.seq_lens]
    blocks = (1 + torch.randperm(sum(used))).int()
    tables = torch.zeros((count + 1, max(used)), dtype=torch.int32)
    for row, part in enumerate(blocks.split(used)):
        tables[row, : used[row]] = part
    starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    num_tokens = sum(case.query_lens)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    inputs = ForwardInputs(
        input_ids=nothing,
        positions=nothing,
        slot_mapping=nothing,
        query_starts=starts.to(device),
        seq_lens=torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
        rows=torch.arange(count, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        logits_indices=nothing,
        host_query_lens=case.query_lens,
        host_seq_lens=case.seq_lens,
    )
    shape = ((sum(used) + 1) * block_size, NUM_KV_HEADS, HEAD_DIM)
    layers = min(MAX_LAYERS, max(2, -(-CACHE_BYTES // case.kv_bytes)))
    keys = [torch.randn(shape, dtype=DTYPE, device=device) for _ in range(layers)]
    values = [torch.randn(shape, dtype=DTYPE, device=device) for _ in range(layers)]
    q = torch.randn((num_tokens, NUM_HEADS, HEAD_DIM), dtype=DTYPE, device=device)
    expected = reference_in_parts(q, keys[0], values[0], inputs, block_size)
    return Problem(inputs=inputs, q=q, keys=keys, values=values, expected=expected)


def reference_in_parts(q: Tensor, keys: Tensor, values: Tensor, inputs: ForwardInputs, block_size: int) -> Tensor:
    """The reference, with long prompts cut so that the scores of all heads fit into memory."""
    parts = []
    for entry, (query_len, seq_len) in enumerate(zip(inputs.host_query_lens, inputs.host_seq_lens, strict=True)):
        begin = sum(inputs.host_query_lens[:entry])
        for start in range(0, query_len, 256):
            stop = min(start + 256, query_len)
            part = ForwardInputs(
                input_ids=inputs.input_ids,
                positions=inputs.positions,
                slot_mapping=inputs.slot_mapping,
                query_starts=torch.tensor([0, stop - start], dtype=torch.int32, device=q.device),
                seq_lens=torch.tensor([seq_len - query_len + stop], dtype=torch.int32, device=q.device),
                rows=inputs.rows[entry : entry + 1],
                block_tables=inputs.block_tables,
                logits_indices=inputs.logits_indices,
                host_query_lens=(stop - start,),
                host_seq_lens=(seq_len - query_len + stop,),
            )
            rows = q[begin + start : begin + stop]
            parts.append(
                paged_attention_reference(rows, keys, values, part, block_size, scale=HEAD_DIM**-0.5, window=None)
            )
    return torch.cat(parts)


def graph_time_s(run: Callable[[], None], *, repeats: int) -> float:
    """Median seconds of a replay of ``run`` captured in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def time_setting(
    case: Case, problem: Problem, block_size: int, tile: TileShape, programs: int, bandwidth: float, repeats: int
) -> dict[str, object]:
    backend = TritonAttention(
        num_multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count,
        decode_tile=tile if case.is_decode else None,
        prefill_tile=None if case.is_decode else tile,
        programs_per_multiprocessor=programs,
        dependent_launch=has_dependent_launch(torch.device("cuda")),
    )
    out = torch.empty((problem.q.shape[0], NUM_HEADS * HEAD_DIM), dtype=DTYPE, device="cuda")

    def run() -> None:
        plan = backend.plan(problem.inputs, block_size)
        # Layer 0 last, so that its result is the one left to check.
        for keys, values in zip(reversed(problem.keys), reversed(problem.values), strict=True):
            backend.attend(problem.q, keys, values, plan, scale=HEAD_DIM**-0.5, window=None, out=out)

    result: dict[str, object] = {"case": case.name, "block_size": block_size, "programs": programs, **asdict(tile)}
    try:
        seconds = graph_time_s(run, repeats=repeats) / len(problem.keys)
    except triton.runtime.errors.OutOfResources as error:
        return result | {"failed": str(error)}
    relative = ((out.float() - problem.expected).norm() / problem.expected.norm()).item()
    if not relative < MAX_ERROR:
        return result | {"failed": f"relative error {relative:.2e} exceeds {MAX_ERROR}"}
    rate = case.kv_bytes / seconds
    return result | {
        "layer_us": seconds * 1e6,
        "kv_tb_s": rate / 1e12,
        "share_of_read_bandwidth": rate / bandwidth,
        "tflop_s": case.flops / seconds / 1e12,
        "relative_error": relative,
    }


def describe(result: dict[str, object]) -> str:
    setting = "rows {rows:3} keys {keys:3} warps {num_warps} stages {num_stages} programs {programs}".format(**result)
    if "failed" in result:
        return f"  {setting}  {result['failed']}"
    return (
        "  {0}  {layer_us:9.1f} us  {kv_tb_s:6.3f} TB/s  {share_of_read_bandwidth:6.1%} of read bandwidth"
        "  {tflop_s:6.1f} TFLOP/s  error {relative_error:.1e}"
    ).format(setting, **result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, nargs="+", default=[16])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="default settings only")
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = measure_read_bandwidth(torch.device("cuda", 0))
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}: reads {bandwidth / 1e12:.2f} TB/s")
    results = []
    for case in all_cases():
        if options.case not in case.name:
            continue
        settings = decode_settings(quick=options.quick) if case.is_decode else prefill_settings(quick=options.quick)
        for block_size in options.block_size:
            problem = make_problem(case, block_size)
            print(f"{case.name}, blocks of {block_size}, {len(problem.keys)} layers; default, then the best five:")
            timed = [
                time_setting(case, problem, block_size, tile, programs, bandwidth, options.repeats)
                for tile, programs in settings
            ]
            del problem
            best = sorted((r for r in timed[1:] if "layer_us" in r), key=lambda r: r["layer_us"])[:5]
            for result in [timed[0], *best, *(r for r in timed[1:] if "failed" in r)]:
                print(describe(result), flush=True)
            results += timed
    if options.json:
        found = {"environment": environment(torch.device("cuda", 0)), "read_tb_s": bandwidth / 1e12, "results": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
