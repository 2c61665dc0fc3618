"""A layer's four products in a row, with weights streamed and without; writes the second tiles of the engine's table.

    PYTHONPATH=src python benchmarks/kernels/streamed.py --preset llama-3.1-8b --write

The idea: what streaming gains lies between kernels, so the products are timed as a layer makes them, one after the
other, captured in a CUDA graph over many layers' weights. Every ring that takes more than half of a multiprocessor's
shared memory and fits into it is tried for the products of one tile, and for gate and up. The best set gets into the
table if it beats the first tiles by 1 % and agrees with them. Needs compute capability 9.0.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from paged_attention import graph_time_s
from skinny import (
    COPIES_BYTES,
    DTYPE,
    MAX_ERROR,
    SHARED_BYTES,
    Matrix,
    arguments,
    compile_beforehand,
    keep,
    matrices,
)
from torch import Tensor

from gapless.kernels.layer_ops import TritonOps
from gapless.kernels.tuned_table import ProductKey, StreamedTile, TunedTable
from gapless.layers.linear import Linear
from gapless.layers.ops import PreparedNorm, Residual
from gapless.layers.rope import Rotation
from gapless.model.checkpoint.presets import open_preset
from gapless.model.spec import ModelSpec
from gapless.timeline.roofline import measure_read_bandwidth

GAIN = 0.99
# What a kernel needs besides its ring.
REST_BYTES = 4 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Rings:
    """Stages of the rings of a layer's products."""

    single: int
    double: int

    def tiles(self, products: list[Matrix], tokens: int) -> dict[ProductKey, StreamedTile]:
        """The table's entries; o and down are split in two, as they have few tiles."""
        return {
            matrix.key(tokens): StreamedTile(
                splits=2 if matrix.kind == "residual" else 1,
                num_stages=self.double if matrix.kind == "gate" else self.single,
            )
            for matrix in products
        }


def candidates(tokens: int) -> Iterator[Rings]:
    """Rings of which one fits, but not two."""
    for single in _stages(StreamedTile.ROWS + tokens):
        for double in _stages(2 * StreamedTile.ROWS + tokens):
            yield Rings(single=single, double=double)


def _stages(rows: int) -> list[int]:
    stage_bytes = rows * StreamedTile.STEP * DTYPE.itemsize
    most = (SHARED_BYTES - REST_BYTES) // stage_bytes
    least = (SHARED_BYTES // 2) // stage_bytes + 1
    return sorted({least, (least + most) // 2, most}) if least <= most else []


class Layers:
    """Layers' weights on the device, and the four products of each."""

    def __init__(self, spec: ModelSpec, products: list[Matrix], tokens: int, count: int) -> None:
        device = torch.device("cuda")
        self.device = device
        self.layers = [
            {
                matrix.name: Linear(
                    torch.empty((matrix.rows, matrix.columns), device=device, dtype=DTYPE).normal_(0, 0.02)
                )
                for matrix in products
            }
            for _ in range(count)
        ]
        self.norm = torch.ones(spec.hidden_size, dtype=DTYPE, device=device)
        self.attended = torch.randn((tokens, spec.num_heads * spec.head_dim), device=device).to(DTYPE)
        self.start = torch.randn((tokens, spec.hidden_size), device=device).to(DTYPE)
        self.squares = self.start.float().square().sum(1)[None]
        angles = torch.rand((tokens, 1, spec.head_dim), device=device)
        self.rotation = Rotation(cos=angles.cos(), sin=angles.sin())
        self.cache = torch.zeros((2, tokens, spec.num_kv_heads, spec.head_dim), dtype=DTYPE, device=device)
        self.slots = torch.arange(tokens, device=device)

    def run(self, ops: TritonOps) -> tuple[Tensor, Tensor]:
        """The residual stream and the last layer's queries."""
        residual = Residual(self.start.clone(), prepared=PreparedNorm(self.start.clone(), self.squares))
        for layer in self.layers:
            q = ops.project_heads(
                residual, self.norm, 1e-5, layer["qkv"], None, self.rotation, self.cache[0], self.cache[1], self.slots
            )
            residual = ops.add_product(residual, self.attended, layer["o"], self.norm)
            x = ops.gated_product(residual, self.norm, 1e-5, layer["gate_up"])
            residual = ops.add_product(residual, x, layer["down"], self.norm)
        return residual.hidden, q

    def ops(self, table: TunedTable, *, streamed: bool) -> TritonOps:
        return TritonOps(self.device, table=table, dependent_launch=True, streamed=streamed)

    def time_s(self, ops: TritonOps, repeats: int) -> float:
        """Seconds of a layer's products."""
        return graph_time_s(lambda: self.run(ops), repeats=repeats) / len(self.layers)


def compile_part(spec: ModelSpec, products: list[Matrix], tokens: list[int], part: int, parts: int) -> None:
    """Compile every ``parts``-th set into Triton's cache."""
    wanted = [(count, rings) for count in tokens for rings in candidates(count)]
    for count, rings in wanted[part::parts]:
        layers = Layers(spec, products, count, 1)
        layers.run(layers.ops(TunedTable(streamed=rings.tiles(products, count)), streamed=True))


def tune(
    spec: ModelSpec, products: list[Matrix], tokens: list[int], table: TunedTable, repeats: int, bandwidth: float
) -> tuple[dict[ProductKey, StreamedTile], list[dict[str, Any]]]:
    """Time every candidate; return the winners and all results."""
    winners: dict[ProductKey, StreamedTile] = {}
    results: list[dict[str, Any]] = []
    layer_bytes = sum(matrix.rows * matrix.columns for matrix in products) * DTYPE.itemsize
    for count in tokens:
        layers = Layers(spec, products, count, max(8, COPIES_BYTES * 4 // layer_bytes))
        plain = layers.ops(table, streamed=False)
        right = layers.run(plain)
        timed: list[tuple[float, Rings]] = []
        for rings in candidates(count):
            ops = layers.ops(TunedTable(table.tiles, rings.tiles(products, count)), streamed=True)
            errors = [
                float((a - b).float().norm() / b.float().norm()) for a, b in zip(layers.run(ops), right, strict=True)
            ]
            if max(errors) < MAX_ERROR:
                timed.append((layers.time_s(ops, repeats), rings))
            else:
                print(f"{count} tokens: {rings} is off by {max(errors):.2e}", flush=True)
        plain_s = layers.time_s(plain, repeats)
        timed.sort(key=lambda each: each[0])
        row: dict[str, Any] = {
            "tokens": count,
            "plain_us": round(plain_s * 1e6, 2),
            "plain_share": round(layer_bytes / plain_s / bandwidth, 3),
        }
        if timed:
            best_s, best = timed[0]
            if best_s < plain_s * GAIN:
                winners |= best.tiles(products, count)
            row |= {"best_us": round(best_s * 1e6, 2), "best_share": round(layer_bytes / best_s / bandwidth, 3)}
            row["all"] = [{"us": round(s * 1e6, 2), **asdict(rings)} for s, rings in timed]
        results.append(row)
        print(json.dumps(row), flush=True)
        del layers
        torch.cuda.empty_cache()
    return winners, results


def main() -> None:
    """Compile, time, and write."""
    options = arguments(__doc__, [16, 32, 64]).parse_args()
    spec = open_preset(options.preset).spec
    products = [matrix for matrix in matrices(spec) if matrix.kind != "logits"]
    torch.set_grad_enabled(False)
    if options.compile_part is not None:
        compile_part(spec, products, options.tokens, options.compile_part, options.jobs)
        return
    compile_beforehand(__file__, options)
    bandwidth = measure_read_bandwidth(torch.device("cuda", 0))
    table = TunedTable.for_device(torch.cuda.get_device_name())
    winners, results = tune(spec, products, options.tokens, table, options.repeats, bandwidth)
    keep(options, TunedTable(table.tiles, dict(table.streamed) | winners), results, bandwidth)


if __name__ == "__main__":
    main()
