"""Whole models on our kernels in Triton's interpreter, against plain torch (see test_kernels_interpreted)."""

from typing import Any

import pytest
import torch

import gapless.layers.linear
from fixtures.checkpoints import Arch, f_hist_config
from fixtures.decode_precision import check_decodes
from gapless.kernels.attention_tiles import TileShape
from gapless.kernels.layer_ops import TritonOps
from gapless.kernels.paged_attention import TritonAttention
from gapless.kernels.skinny import SkinnyTile
from gapless.kernels.tuned_table import ProductKey, ProductKind, TunedTable
from gapless.layers.linear import Linear

CPU = torch.device("cpu")
TILE = TileShape(rows=16, keys=16, num_warps=4, num_stages=2)
ATTENTION = TritonAttention(num_multiprocessors=7, decode_tile=TILE, prefill_tile=TILE)
# The products of F-HIST, see fixtures.checkpoints: kind, outputs, inputs, and parts of the inner axis.
PRODUCTS: tuple[tuple[ProductKind, int, int, int], ...] = (
    ("heads", 256, 64, 2),
    ("residual", 64, 128, 2),
    ("gate", 192, 64, 1),
    ("residual", 64, 96, 3),
    ("logits", 128, 64, 1),
)
SECOND_LAYER_SLIDES = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


class FusedInFloat32(TritonOps):
    """The table's products in fp32 as well, the one dtype that the interpreter has."""

    def __init__(self) -> None:
        super().__init__(CPU, table=table())
        self.done: set[ProductKind] = set()

    def _tile(self, kind: ProductKind, linear: Linear, num_tokens: int) -> SkinnyTile | None:
        tile = self._table.find(kind, linear.shape[0], linear.shape[1], num_tokens)
        if tile is not None:
            self.done.add(kind)
        return tile


def table() -> TunedTable:
    """Tiles for the products of F-HIST, in steps of up to 16 tokens."""
    return TunedTable(
        {
            ProductKey(kind=kind, out_features=rows, in_features=columns, tokens=16): SkinnyTile(
                block_n=32, block_k=16, splits=splits, num_warps=4, num_stages=2
            )
            for kind, rows, columns, splits in PRODUCTS
        }
    )


@pytest.fixture(autouse=True)
def _plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in rows, as kernels read them; elsewhere on CPUs a layer packs them."""
    monkeypatch.setattr(gapless.layers.linear, "_can_pack", lambda dtype, device: False)


@pytest.mark.parametrize(
    ("arch", "options", "ops"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, TritonOps(CPU)),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}, FusedInFloat32()),
        ("qwen3", SECOND_LAYER_SLIDES, FusedInFloat32()),
    ],
)
def test_decodes(arch: Arch, options: dict[str, Any], ops: TritonOps) -> None:
    config = f_hist_config(arch, **options)
    check_decodes(
        config, sizes=(1, 3), dtype=torch.float32, device="cpu", ops=ops, attention=ATTENTION, longest_prompt=12
    )
    if isinstance(ops, FusedInFloat32):
        assert ops.done == {"heads", "residual", "gate", "logits"}
