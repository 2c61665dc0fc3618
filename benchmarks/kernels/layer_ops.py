"""The kernels between a layer's matrix products, against plain torch, at the shapes of Llama-3.1-8B in bf16.

    PYTHONPATH=src python benchmarks/kernels/layer_ops.py --json layer_ops.json

Each operation is captured in a CUDA graph 32 times over, as a decode step runs it; the median replay over 32 is the
time of one. The share of the read bandwidth counts bytes read and written once; a few tokens are bound by launches.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from paged_attention import graph_time_s, read_bandwidth

from gapless.kernels.layer_ops import TritonOps
from gapless.layers.ops import LayerOps, TorchOps
from gapless.layers.rope import Rotation

HIDDEN, MLP, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, DTYPE = 4096, 14336, 32, 8, 128, torch.bfloat16
LAYERS = 32


def cases(num_tokens: int) -> dict[str, tuple[int, Callable[[LayerOps], object]]]:
    """Each operation's bytes, and a call of it."""
    hidden, delta = torch.randn((2, num_tokens, HIDDEN), device="cuda").to(DTYPE)
    weight = torch.ones(HIDDEN, dtype=DTYPE, device="cuda")
    qkv = torch.randn((num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM), device="cuda").to(DTYPE)
    angles = torch.rand((num_tokens, 1, HEAD_DIM), device="cuda")
    rotation = Rotation(cos=angles.cos(), sin=angles.sin())
    cache = torch.zeros((2, 65536, NUM_KV_HEADS, HEAD_DIM), dtype=DTYPE, device="cuda")
    slots = torch.randperm(65536, device="cuda")[:num_tokens]
    gate_up = torch.randn((num_tokens, 2 * MLP), device="cuda").to(DTYPE)
    return {
        "add_rms_norm": (4 * hidden.nbytes, lambda ops: ops.add_rms_norm(hidden, delta, weight, 1e-5)),
        "rotate_and_write": (
            2 * qkv.nbytes,
            lambda ops: ops.rotate_and_write(qkv, None, 1e-5, rotation, cache[0], cache[1], slots),
        ),
        "silu_and_mul": (gate_up.nbytes * 3 // 2, lambda ops: ops.silu_and_mul(gate_up)),
    }


def main() -> None:
    """Time every operation at every number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32, 256, 8192])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    bandwidth = read_bandwidth(options.repeats)
    results = []
    for num_tokens in options.tokens:
        for name, (num_bytes, call) in cases(num_tokens).items():
            row: dict[str, object] = {"operation": name, "tokens": num_tokens}
            for form, ops in (("triton", TritonOps()), ("torch", TorchOps())):

                def run(ops: LayerOps = ops, call: Callable[[LayerOps], object] = call) -> None:
                    for _ in range(LAYERS):
                        call(ops)

                seconds = graph_time_s(run, repeats=options.repeats) / LAYERS
                row[f"{form}_us"] = round(seconds * 1e6, 2)
                row[f"{form}_share_of_read_bandwidth"] = round(num_bytes / seconds / bandwidth, 3)
            results.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        environment = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "read_tb_s": bandwidth / 1e12,
        }
        options.json.write_text(json.dumps({"environment": environment, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
