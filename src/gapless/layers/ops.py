"""A decoder layer in a few operations: the protocol :class:`LayerOps` and its torch form.

The idea: a decode step on a GPU is a long row of small kernels, and what may be merged with what differs from device to
device. So the layer is cut where every device has to stop anyway: before attention, after it, and at the gate. On CUDA
an operation is one to three kernels (``gapless.kernels.layer_ops``), elsewhere a few torch operations.

The residual stream is passed as a :class:`Residual`, which says how far the next norm has been prepared: its input may
still lack the last product, or the norm's sums may have been formed on the way.

No state; called on the thread that runs the compute stream, inside ``inference_mode``, without a host sync.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gapless.layers.activation import silu_and_mul
from gapless.layers.linear import Linear
from gapless.layers.norm import rms_norm
from gapless.layers.rope import Rotation

__all__ = ["LayerOps", "PreparedNorm", "Residual", "TorchOps", "add_rms_norm", "picked", "rotate_and_write"]


@dataclass(frozen=True, slots=True)
class PreparedNorm:
    """An RMS norm but for its scale, which commutes with the matrix product that follows.

    Attributes:
        weighted: ``[num_tokens, hidden_size]``: the residual stream times the norm's weight.
        squares: ``[num_parts, num_tokens]``, fp32: sums of squares of the residual stream, by parts of its width.
    """

    weighted: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream.

    Attributes:
        hidden: ``[num_tokens, hidden_size]``; the next norm adds ``delta`` to it in place.
        delta: what the last product adds to it, the same shape; ``None`` where it has been added.
        prepared: of the norm that comes next, if that was begun; ``delta`` is ``None`` then.
    """

    hidden: Tensor
    delta: Tensor | None = None
    prepared: PreparedNorm | None = None


class LayerOps(Protocol):
    """What a decoder layer does besides attention; sums and norms are fp32 inside."""

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
        """Complete and norm the residual stream; make queries, and write keys and values into the cache.

        Args:
            residual: its ``hidden`` is completed in place.
            norm: ``[hidden_size]``, the weight of the RMS norm.
            eps: of all norms.
            qkv: to ``(num_heads + 2 * num_kv_heads) * head_dim`` outputs.
            qk_norm: ``[num_heads + num_kv_heads, head_dim]``, a weight for each head, or ``None``.
            rotation: of the step's positions.
            keys, values: one layer of the cache, ``[num_slots, num_kv_heads, head_dim]``.
            slots: ``[num_tokens]``, int64.

        Returns:
            Normed and rotated queries, ``[num_tokens, num_heads, head_dim]``.
        """
        ...

    def add_product(self, residual: Residual, x: Tensor, linear: Linear, next_norm: Tensor) -> Residual:
        """The residual stream with ``linear(x)`` added, or yet to be added.

        Args:
            residual: completed by a norm before; its ``hidden`` may be changed in place.
            x: ``[num_tokens, in_features]``.
            linear: to ``hidden_size`` outputs.
            next_norm: ``[hidden_size]``, the weight of the norm that comes next.
        """
        ...

    def gated_product(self, residual: Residual, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """Complete and norm the residual stream; ``silu(gate) * up`` of it, ``[num_tokens, size]``.

        Args:
            residual: its ``hidden`` is completed in place.
            norm: ``[hidden_size]``.
            eps: of the norm.
            gate_up: to ``2 * size`` outputs, the gate's first.
        """
        ...

    def final_norm(self, residual: Residual, norm: Tensor, eps: float, tokens: Tensor | None) -> Tensor:
        """The normed residual stream of some tokens, ``[n, hidden_size]``.

        Args:
            residual: the last one.
            norm: ``[hidden_size]``.
            eps: of the norm.
            tokens: ``[n]``, int64; ``None`` is all.
        """
        ...

    def logits(self, hidden: Tensor, head: Linear) -> Tensor:
        """``head(hidden)``, ``[n, vocab_size]``, fp32, of ``hidden: [n, hidden_size]``."""
        ...


class TorchOps:
    """Plain torch: the CPU's form, and the reference of the kernels."""

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
        """See :meth:`LayerOps.project_heads`."""
        x = add_rms_norm(residual, norm, eps)
        heads = qkv(x).view(len(x), -1, keys.shape[2])
        return rotate_and_write(heads, qk_norm, eps, rotation, keys, values, slots)

    def add_product(self, residual: Residual, x: Tensor, linear: Linear, next_norm: Tensor) -> Residual:
        """See :meth:`LayerOps.add_product`."""
        return Residual(residual.hidden, linear(x))

    def gated_product(self, residual: Residual, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """See :meth:`LayerOps.gated_product`."""
        return silu_and_mul(gate_up(add_rms_norm(residual, norm, eps)))

    def final_norm(self, residual: Residual, norm: Tensor, eps: float, tokens: Tensor | None) -> Tensor:
        """See :meth:`LayerOps.final_norm`."""
        return add_rms_norm(picked(residual, tokens), norm, eps)

    def logits(self, hidden: Tensor, head: Linear) -> Tensor:
        """See :meth:`LayerOps.logits`."""
        return head(hidden).float()


def picked(residual: Residual, tokens: Tensor | None) -> Residual:
    """The residual stream of ``tokens: [n]``, int64; all of it for ``None``."""
    if tokens is None:
        return residual
    delta = None if residual.delta is None else residual.delta.index_select(0, tokens)
    return Residual(residual.hidden.index_select(0, tokens), delta)


def add_rms_norm(residual: Residual, weight: Tensor, eps: float) -> Tensor:
    """Complete ``residual.hidden`` in place and return its RMS norm, ``[num_tokens, hidden_size]``.

    Args:
        residual: the residual stream.
        weight: ``[hidden_size]``.
        eps: added to the mean square.
    """
    hidden = residual.hidden
    if residual.delta is not None:
        hidden += residual.delta
    return rms_norm(hidden, weight, eps)


def rotate_and_write(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Rotation,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys; write keys and values into the cache.

    Args:
        qkv: ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``.
        qk_norm, eps, rotation, keys, values, slots: see :meth:`LayerOps.project_heads`.

    Returns:
        Rotated queries, ``[num_tokens, num_heads, head_dim]``.
    """
    rotated = qkv.shape[1] - keys.shape[1]
    qk = qkv[:, :rotated]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    qk = rotation.apply(qk)
    heads = rotated - keys.shape[1]
    keys.index_copy_(0, slots, qk[:, heads:])
    values.index_copy_(0, slots, qkv[:, rotated:])
    return qk[:, :heads]
