"""A decoder layer's operations on CUDA: :class:`TritonOps`.

The idea: a step of few tokens reads every weight once and would spend a tenth of its time between kernels, so its
products do the work around them as well (``fused_products``), where a tuned tile exists and the dtype is bf16: the cut
norm's intermediate is as wide as the residual stream, which fp16 cannot hold. Everything else is done by the library's
products and ``elementwise`` kernels. Which kernel runs depends on shapes alone, so equal steps run equal kernels.
Reference: :class:`gapless.layers.ops.TorchOps`.

Owns the count of arrived programs, zero between kernels. Used on the compute stream.
"""

import torch
from torch import Tensor

from gapless.kernels.dependent_launch import has_dependent_launch
from gapless.kernels.elementwise import add_rms_norm, rotate_and_write, silu_and_mul
from gapless.kernels.fused_products import MAX_ARRIVALS, fused_gate, fused_residual
from gapless.kernels.gluon_support import can_run_gluon
from gapless.kernels.skinny import SkinnyTile, skinny_product
from gapless.kernels.tuned_table import ProductKind, StreamedTile, TunedTable
from gapless.layers.linear import Linear
from gapless.layers.ops import Residual, picked
from gapless.layers.rope import Rotation

__all__ = ["TritonOps"]


class TritonOps:
    """:class:`gapless.layers.ops.LayerOps` for CUDA devices.

    Args:
        device: where the model lives.
        table: products that kernels of ours do; all others are the library's.
        dependent_launch: launch kernels early, see :mod:`gapless.kernels.dependent_launch`.
        streamed: use the table's second tiles, those of ``streamed_products``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        table: TunedTable | None = None,
        dependent_launch: bool = False,
        streamed: bool = False,
    ) -> None:
        self._table = table or TunedTable()
        self._dependent = dependent_launch
        self._streamed = streamed
        self._arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)

    @classmethod
    def for_device(cls, device: torch.device) -> "TritonOps":
        """With what was tuned for a CUDA device."""
        table = TunedTable.for_device(torch.cuda.get_device_name(device))
        return cls(
            device,
            table=table,
            dependent_launch=has_dependent_launch(device),
            streamed=can_run_gluon(device),
        )

    def project_heads(
        self,
        residual: Residual,
        norm: Tensor,
        eps: float,
        qkv: Linear,
        qk_norm: Tensor | None,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """See :meth:`gapless.layers.ops.LayerOps.project_heads`."""
        num_tokens, head_dim = len(residual.hidden), keys.shape[2]
        rest = (qk_norm, eps, rotation, keys, values, slots)
        tile = self._tile("heads", qkv, num_tokens)
        if tile is None:
            heads = qkv(self._normed(residual, norm, eps)).view(1, num_tokens, -1, head_dim)
            return rotate_and_write(heads, *rest, dependent=self._dependent)
        x, squares = self._norm_input(residual, norm, eps)
        product = torch.empty((tile.splits, num_tokens, qkv.shape[0]), dtype=torch.float32, device=x.device)
        if isinstance(tile, StreamedTile):
            from gapless.kernels.streamed_products import streamed_product

            streamed_product(x, qkv.weight, product, tile, dependent=self._dependent)
        else:
            skinny_product(x, qkv.weight, product, tile, dependent=self._dependent)
        return rotate_and_write(
            product.view(tile.splits, num_tokens, -1, head_dim),
            *rest,
            squares=squares,
            bias=qkv.bias,
            hidden_size=len(norm),
            dependent=self._dependent,
        )

    def add_product(self, residual: Residual, x: Tensor, linear: Linear, next_norm: Tensor) -> Residual:
        """See :meth:`gapless.layers.ops.LayerOps.add_product`."""
        tile, hidden = self._tile("residual", linear, len(x)), residual.hidden
        operands = (x, linear.weight, linear.bias, hidden, next_norm, self._arrivals)
        if tile is None:
            return Residual(hidden, linear(x))
        if isinstance(tile, StreamedTile):
            from gapless.kernels.streamed_products import streamed_residual

            return Residual(hidden, prepared=streamed_residual(*operands, tile, dependent=self._dependent))
        return Residual(hidden, prepared=fused_residual(*operands, tile, dependent=self._dependent))

    def gated_product(self, residual: Residual, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """See :meth:`gapless.layers.ops.LayerOps.gated_product`."""
        tile = self._tile("gate", gate_up, len(residual.hidden))
        if tile is None or gate_up.bias is not None:
            return silu_and_mul(gate_up(self._normed(residual, norm, eps)), dependent=self._dependent)
        x, squares = self._norm_input(residual, norm, eps)
        if isinstance(tile, StreamedTile):
            from gapless.kernels.streamed_products import streamed_gate

            return streamed_gate(x, squares, gate_up.weight, eps, tile, dependent=self._dependent)
        return fused_gate(x, squares, gate_up.weight, eps, tile, dependent=self._dependent)

    def final_norm(self, residual: Residual, norm: Tensor, eps: float, tokens: Tensor | None) -> Tensor:
        """See :meth:`gapless.layers.ops.LayerOps.final_norm`."""
        return self._normed(picked(residual, tokens), norm, eps)

    def logits(self, hidden: Tensor, head: Linear) -> Tensor:
        """See :meth:`gapless.layers.ops.LayerOps.logits`."""
        tile = self._tile("logits", head, len(hidden))
        if tile is None:
            return head(hidden).float()
        assert isinstance(tile, SkinnyTile), "a product that is long enough has no ends to speak of"
        out = torch.empty((len(hidden), head.shape[0]), dtype=torch.float32, device=hidden.device)
        skinny_product(hidden, head.weight, out[None], tile, dependent=self._dependent)
        return out

    def _norm_input(self, residual: Residual, norm: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        """What a fused product reads: the weighted stream and its squares if they were prepared, or the normed one."""
        if residual.prepared is not None:
            return residual.prepared.weighted, residual.prepared.squares
        return self._normed(residual, norm, eps), None

    def _normed(self, residual: Residual, norm: Tensor, eps: float) -> Tensor:
        return add_rms_norm(residual, norm, eps, dependent=self._dependent)

    def _tile(self, kind: ProductKind, linear: Linear, num_tokens: int) -> SkinnyTile | StreamedTile | None:
        """The tile with which a kernel of ours does a product, or ``None``."""
        if linear.dtype != torch.bfloat16:
            return None
        return self._table.find(kind, linear.shape[0], linear.shape[1], num_tokens, streamed=self._streamed)
