"""Which matrix products a kernel of ours does, and with which tiles: :class:`TunedTable`, read from a file.

The idea: the library's kernel is at the limit for some shapes and far from it for others, and which tile is best is a
measurement, not a rule. So the choice is data: a JSON file for each device in ``tuned/``, written by ``skinny.py`` and
``streamed.py`` in ``benchmarks/kernels``, which lists only what was measured to beat the library. A shape or a device
that is not there is the library's. A product may have a second tile, for kernels that only some devices can run,
measured to beat the first. The choice depends on the matrix and on the padded number of tokens alone, so equal step
shapes run equal kernels. Immutable; any thread may read it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from gapless.kernels.skinny import SkinnyTile, padded_tokens

__all__ = ["ProductKey", "ProductKind", "StreamedTile", "TunedTable", "table_path"]

ProductKind = Literal["heads", "residual", "gate", "logits"]
"""Which kernel: see ``fused_products``, and ``skinny`` for logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductKey:
    """A kind of product.

    Attributes:
        kind: which kernel does it.
        out_features, in_features: of the whole weight.
        tokens: their number, padded: 16, 32, 64 or 128.
    """

    kind: ProductKind
    out_features: int
    in_features: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedTile:
    """Launch settings of ``streamed_products``.

    Attributes:
        splits: programs that share the inner axis of a tile.
        num_stages: tiles of weights, and of tokens, in a program's ring.
        ROWS: weight rows of a program; where it has gate and up, of each.
        STEP: length of a step along the inner axis.
    """

    splits: int
    num_stages: int
    ROWS: ClassVar[int] = 64
    STEP: ClassVar[int] = 128

    def fits(self, out_features: int, in_features: int) -> bool:
        """Whether the tile divides a matrix evenly, as the kernels demand."""
        return out_features % self.ROWS == 0 and in_features % (self.STEP * self.splits) == 0


@dataclass(frozen=True, slots=True)
class TunedTable:
    """Tiles by product; what is missing is left to the library.

    Attributes:
        tiles: of ``skinny`` and ``fused_products``.
        streamed: of ``streamed_products``, for devices that can run them.
    """

    tiles: Mapping[ProductKey, SkinnyTile] = field(default_factory=dict)
    streamed: Mapping[ProductKey, StreamedTile] = field(default_factory=dict)

    @classmethod
    def for_device(cls, name: str) -> "TunedTable":
        """The table that ships for a device of this name; an empty one if there is none."""
        path = table_path(name)
        return cls.read(path) if path.is_file() else cls()

    @classmethod
    def read(cls, path: Path) -> "TunedTable":
        """Read a file that :meth:`write` made."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            {ProductKey(**row["product"]): SkinnyTile(**row["tile"]) for row in content["products"]},
            {ProductKey(**row["product"]): StreamedTile(**row["tile"]) for row in content["streamed"]},
        )

    def write(self, path: Path, environment: Mapping[str, Any]) -> None:
        """Write the table, a line an entry, with what it was measured on."""
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'{{\n "environment": {json.dumps(dict(environment))},\n "products": [\n  {_lines(self.tiles)}\n ],\n'
            f' "streamed": [\n  {_lines(self.streamed)}\n ]\n}}\n',
            encoding="utf-8",
        )

    def find(
        self, kind: ProductKind, out_features: int, in_features: int, num_tokens: int, *, streamed: bool = False
    ) -> SkinnyTile | StreamedTile | None:
        """The tile for a product, or ``None`` where the library does it; ``streamed`` allows second tiles."""
        tokens = padded_tokens(num_tokens)
        if tokens is None or not num_tokens:
            return None
        key = ProductKey(kind=kind, out_features=out_features, in_features=in_features, tokens=tokens)
        second = self.streamed.get(key) if streamed else None
        return second or self.tiles.get(key)


def _lines(tiles: Mapping[ProductKey, SkinnyTile] | Mapping[ProductKey, StreamedTile]) -> str:
    rows = [json.dumps({"product": asdict(key), "tile": asdict(tile)}) for key, tile in tiles.items()]
    return ",\n  ".join(rows)


def table_path(device_name: str) -> Path:
    """Where the table for a device lies: ``NVIDIA H200`` is ``nvidia-h200.json``."""
    return Path(__file__).parent / "tuned" / f"{device_name.lower().replace(' ', '-')}.json"
