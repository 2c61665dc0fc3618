"""The element-wise work between a layer's matrix products: the protocol :class:`LayerOps` and its torch form.

A decode step on a GPU is a long row of small kernels, so what stands between two matrix products is one operation
here: on CUDA a Triton kernel each (``gapless.kernels.layer_ops``), elsewhere a few torch operations. No state; called
on the thread that runs the compute stream, inside ``inference_mode``, without a host sync.
"""

from typing import Protocol

from torch import Tensor

from gapless.layers.activation import silu_and_mul
from gapless.layers.norm import rms_norm
from gapless.layers.rope import Rotation

__all__ = ["LayerOps", "TorchOps"]


class LayerOps(Protocol):
    """What a decoder layer does besides matrix products and attention; sums and norms are fp32 inside."""

    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """``hidden += delta`` in place, then its RMS norm.

        Args:
            hidden: ``[num_tokens, hidden_size]``, the residual stream.
            delta: what the last block adds to it, the same shape; ``None`` before the first layer.
            weight: ``[hidden_size]``.
            eps: added to the mean square.
        """
        ...

    def rotate_and_write(
        self,
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
            qk_norm: ``[num_heads + num_kv_heads, head_dim]``, a weight for each head, or ``None``.
            eps: of that norm.
            rotation: of the step's positions.
            keys, values: one layer of the cache, ``[num_slots, num_kv_heads, head_dim]``.
            slots: ``[num_tokens]``, int64.

        Returns:
            Rotated queries, ``[num_tokens, num_heads, head_dim]``.
        """
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``: ``[num_tokens, size]`` from ``[num_tokens, 2 * size]``."""
        ...


class TorchOps:
    """Plain torch: the CPU's form, and the reference of the kernels."""

    def add_rms_norm(self, hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """See :meth:`LayerOps.add_rms_norm`."""
        if delta is not None:
            hidden += delta
        return rms_norm(hidden, weight, eps)

    def rotate_and_write(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        rotation: Rotation,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """See :meth:`LayerOps.rotate_and_write`."""
        rotated = qkv.shape[1] - keys.shape[1]
        qk = qkv[:, :rotated]
        if qk_norm is not None:
            qk = rms_norm(qk, qk_norm, eps)
        qk = rotation.apply(qk)
        heads = rotated - keys.shape[1]
        keys.index_copy_(0, slots, qk[:, heads:])
        values.index_copy_(0, slots, qkv[:, rotated:])
        return qk[:, :heads]

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See :meth:`LayerOps.silu_and_mul`."""
        return silu_and_mul(gate_up)
