"""The gate of the decoder's feed-forward layer: SwiGLU (Shazeer, arXiv:2002.05202)."""

from torch import Tensor
from torch.nn import functional as F

__all__ = ["silu_and_mul"]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up``: ``[num_tokens, size]`` from ``[num_tokens, 2 * size]``, which holds the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
