"""The kernels between a layer's matrix products, against plain torch, at the shapes of Llama-3.1-8B in bf16.

    PYTHONPATH=src python benchmarks/kernels/layer_ops.py --json layer_ops.json

Each operation is captured in a CUDA graph 32 times over, as a decode step runs it; the median replay over 32 is the
time of one. The share of the read bandwidth counts bytes read and written once; a few tokens are bound by launches.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from paged_attention import graph_time_s

from gapless.bench.report import environment
from gapless.kernels import elementwise
from gapless.kernels.dependent_launch import has_dependent_launch
from gapless.layers import ops as plain
from gapless.layers.activation import silu_and_mul
from gapless.layers.ops import Residual
from gapless.layers.rope import Rotation
from gapless.timeline.roofline import measure_read_bandwidth

HIDDEN, MLP, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 4096, 14336, 32, 8, 128, torch.bfloat16
LAYERS = 32
EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation in both forms, and the bytes that it reads and writes."""

    name: str
    num_bytes: int
    triton: Callable[[], object]
    torch: Callable[[], object]


def operations(num_tokens: int, device: torch.device) -> list[Operation]:
    """All three, over inputs of their own."""
    early = has_dependent_launch(device)
    hidden, delta = torch.randn((2, num_tokens, HIDDEN), device=device).to(DTYPE)
    residual, weight = Residual(hidden, delta), torch.ones(HIDDEN, dtype=DTYPE, device=device)
    qkv = torch.randn((num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), device=device).to(DTYPE)
    angles = torch.rand((num_tokens, 1, HEAD_DIM), device=device)
    cache = torch.zeros((2, 65536, NUM_KV_HEADS, HEAD_DIM), dtype=DTYPE, device=device)
    slots = torch.randperm(65536, device=device)[:num_tokens]
    rest = (None, EPS, Rotation(cos=angles.cos(), sin=angles.sin()), cache[0], cache[1], slots)
    gate_up = torch.randn((num_tokens, 2 * MLP), device=device).to(DTYPE)
    return [
        Operation(
            name="add_rms_norm",
            num_bytes=4 * hidden.nbytes,
            triton=lambda: elementwise.add_rms_norm(residual, weight, EPS, dependent=early),
            torch=lambda: plain.add_rms_norm(residual, weight, EPS),
        ),
        Operation(
            name="rotate_and_write",
            num_bytes=2 * qkv.nbytes,
            triton=lambda: elementwise.rotate_and_write(qkv[None], *rest, dependent=early),
            torch=lambda: plain.rotate_and_write(qkv, *rest),
        ),
        Operation(
            name="silu_and_mul",
            num_bytes=gate_up.nbytes * 3 // 2,
            triton=lambda: elementwise.silu_and_mul(gate_up, dependent=early),
            torch=lambda: silu_and_mul(gate_up),
        ),
    ]


def main() -> None:
    """Time every operation at every number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    bandwidth = measure_read_bandwidth(device)
    results = []
    for num_tokens in options.tokens:
        for operation in operations(num_tokens, device):
            row: dict[str, object] = {"operation": operation.name, "tokens": num_tokens}
            for form, call in (("triton", operation.triton), ("torch", operation.torch)):

                def run(call: Callable[[], object] = call) -> None:
                    for _ in range(LAYERS):
                        call()

                seconds = graph_time_s(run, repeats=options.repeats) / LAYERS
                row[f"{form}_us"] = round(seconds * 1e6, 2)
                row[f"{form}_share_of_read_bandwidth"] = round(operation.num_bytes / seconds / bandwidth, 3)
            results.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        found = {"environment": environment(device), "read_tb_s": bandwidth / 1e12, "results": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
