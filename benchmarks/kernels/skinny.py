"""A layer's operations at few tokens: library products against tiles of ours; writes the engine's table.

    PYTHONPATH=src python benchmarks/kernels/skinny.py --preset llama-3.1-8b --write

The idea: what counts is what a layer pays, so an operation is timed whole: the library's product with the kernels
around it, against the one kernel that does it all. Each is captured in a CUDA graph over copies of the weight that no
cache can hold. A tile gets into the table only if it beats the library by 2 % and agrees with it. Kernels are compiled
by several processes beforehand (``--jobs``).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from paged_attention import graph_time_s
from torch import Tensor

from gapless.bench.report import environment
from gapless.kernels.dependent_launch import has_dependent_launch
from gapless.kernels.layer_ops import TritonOps
from gapless.kernels.skinny import SkinnyTile
from gapless.kernels.tuned_table import ProductKey, ProductKind, TunedTable, table_path
from gapless.layers.linear import Linear
from gapless.layers.ops import PreparedNorm, Residual
from gapless.layers.rope import Rotation
from gapless.model.checkpoint.presets import open_preset
from gapless.model.spec import ModelSpec
from gapless.timeline.roofline import measure_read_bandwidth

DTYPE = torch.bfloat16
COPIES_BYTES = 1 << 30
GAIN = 0.98
MAX_ERROR = 1.5e-2
SHARED_BYTES = 227 << 10
# Rows, inner step, warps, stages: of kernels with one tile a program, and with two.
SINGLE = (
    (64, 64, 4, 6),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 5),
    (128, 64, 4, 6),
    (128, 64, 8, 5),
    (128, 128, 8, 4),
)
DOUBLE = (
    (64, 64, 4, 4),
    (64, 64, 4, 5),
    (64, 64, 4, 6),
    (64, 64, 8, 5),
    (64, 128, 4, 3),
    (64, 128, 4, 4),
    (64, 128, 8, 4),
)
SPLITS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """One of a model's matrices."""

    name: str
    kind: ProductKind
    rows: int
    columns: int

    def key(self, tokens: int) -> ProductKey:
        return ProductKey(kind=self.kind, out_features=self.rows, in_features=self.columns, tokens=tokens)

    def candidates(self, tokens: int) -> Iterator[SkinnyTile]:
        """Tiles that divide the matrix, fit into shared memory and fill the device without too many programs."""
        double = self.kind == "gate"
        count = torch.cuda.get_device_properties(0).multi_processor_count
        for rows, block_k, num_warps, num_stages in DOUBLE if double else SINGLE:
            for splits in SPLITS if self.kind in ("heads", "residual") else (1,):
                tile = SkinnyTile(
                    block_n=rows,
                    block_k=block_k, splits=splits, num_warps=num_warps, num_stages=num_stages,
                )  # fmt: skip
                tile_rows = tile.block_n * (2 if double else 1)
                programs = self.rows // tile_rows * splits
                shared = num_stages * block_k * (tile_rows + tokens) * DTYPE.itemsize
                fills = 0.7 * count <= programs and (splits == 1 or programs <= 5 * count)
                if (
                    self.rows % tile_rows == 0
                    and tile.fits(self.rows, self.columns)
                    and shared < SHARED_BYTES
                    and fills
                ):
                    yield tile


def matrices(spec: ModelSpec) -> list[Matrix]:
    """The four of a layer, and the output head."""
    width, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    return [
        Matrix(name="qkv", kind="heads", rows=width + 2 * kv, columns=hidden),
        Matrix(name="o", kind="residual", rows=hidden, columns=width),
        Matrix(name="gate_up", kind="gate", rows=2 * spec.intermediate_size, columns=hidden),
        Matrix(name="down", kind="residual", rows=hidden, columns=spec.intermediate_size),
        Matrix(name="head", kind="logits", rows=spec.vocab_size, columns=hidden),
    ]


class Problem:
    """An operation on the device, over several copies of its weight."""

    def __init__(self, matrix: Matrix, tokens: int, spec: ModelSpec, copies: int) -> None:
        device = torch.device("cuda")
        self.matrix, self.spec, self.device = matrix, spec, device
        self.linears = [
            Linear(torch.empty((matrix.rows, matrix.columns), device=device, dtype=DTYPE).normal_(0, 0.02))
            for _ in range(copies)
        ]
        self.x = torch.randn((tokens, matrix.columns), device=device).to(DTYPE)
        self.norm = torch.ones(spec.hidden_size, dtype=DTYPE, device=device)
        hidden = torch.randn((tokens, spec.hidden_size), device=device).to(DTYPE)
        parts = spec.hidden_size // 64 if spec.hidden_size % 64 == 0 else 1
        squares = hidden.float().square().unflatten(1, (parts, -1)).sum(2).T.contiguous()
        self.hidden, self.prepared = hidden, PreparedNorm(hidden, squares)
        angles = torch.rand((tokens, 1, spec.head_dim), device=device)
        self.rotation = Rotation(cos=angles.cos(), sin=angles.sin())
        self.cache = torch.zeros((2, tokens, spec.num_kv_heads, spec.head_dim), dtype=DTYPE, device=device)
        self.slots = torch.arange(tokens, device=device)

    def ops(self, tile: SkinnyTile | None) -> TritonOps:
        """Operations that do this product with ``tile``; with the library's kernel for ``None``."""
        table = TunedTable({} if tile is None else {self.matrix.key(len(self.x)): tile})
        return TritonOps(self.device, table=table, dependent_launch=has_dependent_launch(self.device))

    def call(self, ops: TritonOps, linear: Linear, residual: Residual) -> Tensor:
        """The operation once."""
        if self.matrix.kind == "heads":
            return ops.project_heads(
                residual, self.norm, 1e-5, linear, None, self.rotation, self.cache[0], self.cache[1], self.slots
            )
        if self.matrix.kind == "gate":
            return ops.gated_product(residual, self.norm, 1e-5, linear)
        if self.matrix.kind == "logits":
            return ops.logits(self.x, linear)
        return _complete(ops.add_product(residual, self.x, linear, self.norm))

    def residual(self, tile: SkinnyTile | None) -> Residual:
        """What the operation before leaves: a prepared norm, or a product yet to be added. It is changed in place."""
        hidden = self.hidden.clone()
        return Residual(
            hidden, torch.zeros_like(hidden) if tile is None else None, None if tile is None else self.prepared
        )

    def time_s(self, tile: SkinnyTile | None, repeats: int) -> float:
        """Seconds of the operation."""
        ops, residual = self.ops(tile), self.residual(tile)

        def run() -> None:
            for linear in self.linears:
                self.call(ops, linear, residual)

        return graph_time_s(run, repeats=repeats) / len(self.linears)

    def result(self, tile: SkinnyTile | None) -> Tensor:
        """What the operation gives, fp32."""
        residual = self.residual(tile)
        result = self.call(self.ops(tile), self.linears[0], residual)
        if self.matrix.kind == "residual" and tile is None:
            result = residual.hidden + result
        return result.float()


def _complete(residual: Residual) -> Tensor:
    return residual.hidden if residual.delta is None else residual.delta


def compile_part(spec: ModelSpec, chosen: list[Matrix], tokens: list[int], part: int, parts: int) -> None:
    """Compile every ``parts``-th kernel into Triton's cache."""
    wanted = [(m, t, tile) for m in chosen for t in tokens for tile in m.candidates(t)]
    for matrix, count, tile in wanted[part::parts]:
        try:
            Problem(matrix, count, spec, 1).result(tile)
        except triton.runtime.errors.OutOfResources:
            continue


def tune(
    spec: ModelSpec, chosen: list[Matrix], tokens: list[int], repeats: int, bandwidth: float
) -> tuple[dict[ProductKey, SkinnyTile], list[dict[str, Any]]]:
    """Time every candidate; return the winners and all results."""
    winners: dict[ProductKey, SkinnyTile] = {}
    results: list[dict[str, Any]] = []
    for matrix in chosen:
        num_bytes = matrix.rows * matrix.columns * DTYPE.itemsize
        for count in tokens:
            problem = Problem(matrix, count, spec, max(3, COPIES_BYTES // num_bytes))
            library_s, right = problem.time_s(None, repeats), problem.result(None)
            timed: list[tuple[float, SkinnyTile]] = []
            for tile in matrix.candidates(count):
                try:
                    error = float((problem.result(tile) - right).norm() / right.norm())
                    if error < MAX_ERROR:
                        timed.append((problem.time_s(tile, repeats), tile))
                    else:
                        print(f"{matrix.name} x {count}: {tile} is off by {error:.2e}", flush=True)
                except triton.runtime.errors.OutOfResources:
                    continue
            timed.sort(key=lambda each: each[0])
            row: dict[str, Any] = {
                "matrix": matrix.name,
                "tokens": count,
                "library_us": round(library_s * 1e6, 2),
                "library_share": round(num_bytes / library_s / bandwidth, 3),
            }
            if timed:
                best_s, best = timed[0]
                if best_s < library_s * GAIN:
                    winners[matrix.key(count)] = best
                row |= {"best_us": round(best_s * 1e6, 2), "best_share": round(num_bytes / best_s / bandwidth, 3)}
                row["all"] = [[round(s * 1e6, 2), *asdict(tile).values()] for s, tile in timed]
            results.append(row)
            print(json.dumps({**row, "all": row.get("all", [])[:4]}), flush=True)
            del problem, right
            torch.cuda.empty_cache()
    return winners, results


def arguments(doc: str | None, tokens: list[int]) -> argparse.ArgumentParser:
    """What every script that tunes is told."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=tokens)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=12, help="processes that compile")
    parser.add_argument("--write", action="store_true", help="write the table that the engine reads for this device")
    parser.add_argument("--json", type=Path, help="where every result is written")
    parser.add_argument("--compile-part", type=int, help=argparse.SUPPRESS)
    return parser


def compile_beforehand(script: str, options: argparse.Namespace, *others: str) -> None:
    """Run a script once for each part of its kernels, side by side."""
    command = [sys.executable, script, "--preset", options.preset, "--jobs", str(options.jobs)]
    command += ["--tokens", *map(str, options.tokens), *others]
    workers = [subprocess.Popen([*command, "--compile-part", str(part)]) for part in range(options.jobs)]
    for worker in workers:
        worker.wait()


def keep(options: argparse.Namespace, table: TunedTable, results: list[dict[str, Any]], bandwidth: float) -> None:
    """Write table and results, if that was asked for, with what they were measured on."""
    name = torch.cuda.get_device_name()
    measured_on = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    measured_on["read_tb_s"] = round(bandwidth / 1e12, 3)
    if options.write:
        table.write(table_path(name), measured_on)
        print(f"wrote {table_path(name).name}")
    if options.json:
        found = {"environment": environment(torch.device("cuda", 0)) | measured_on, "results": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Compile, time, and write."""
    parser = arguments(__doc__, [16, 32, 64, 128])
    parser.add_argument("--matrices", nargs="+", default=[], help="of qkv, o, gate_up, down, head; default all")
    options = parser.parse_args()
    spec = open_preset(options.preset).spec
    chosen = [matrix for matrix in matrices(spec) if not options.matrices or matrix.name in options.matrices]
    torch.set_grad_enabled(False)
    if options.compile_part is not None:
        compile_part(spec, chosen, options.tokens, options.compile_part, options.jobs)
        return
    compile_beforehand(__file__, options, "--matrices", *(matrix.name for matrix in chosen))
    bandwidth = measure_read_bandwidth(torch.device("cuda", 0))
    winners, results = tune(spec, chosen, options.tokens, options.repeats, bandwidth)
    table = TunedTable.for_device(torch.cuda.get_device_name())
    keep(options, TunedTable(dict(table.tiles) | winners, table.streamed), results, bandwidth)


if __name__ == "__main__":
    main()
