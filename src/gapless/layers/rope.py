"""Rotary position embeddings (Su et al., arXiv:2104.09864), from a table that is made once.

Frequencies and the table are fp32, made on the CPU, so every device rotates by the same bits. The halves convention
is the one of the Hugging Face checkpoints: dimension ``i`` is paired with ``i + head_dim / 2``.

:class:`RopeTable` is device state, read on the compute stream; a :class:`Rotation` belongs to one step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RopeSpec", "RopeTable", "Rotation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """How a model encodes positions, all scaling rules applied.

    Attributes:
        kind: the scaling rule's name in the config, such as ``yarn``; for messages only.
        inv_freq: ``head_dim / 2`` angular frequencies, radians per position; each is an fp32 number.
        attention_factor: factor on cosine and sine (yarn's "temperature", arXiv:2309.00071); 1 otherwise.
        max_positions: positions from here on would need other frequencies, or were never meant to be used.
    """

    kind: str
    inv_freq: tuple[float, ...]
    attention_factor: float
    max_positions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Cosine and signed sine of one step's tokens, fp32, ``[num_tokens, 1, head_dim]``, of equal strides.

    The first half of ``sin`` is negated, so that rotating is ``x * cos + swap_halves(x) * sin``.
    """

    cos: Tensor
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Rotate ``x: [num_tokens, num_heads, head_dim]``, any floating dtype; the arithmetic is fp32."""
        half = x.shape[-1] // 2
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return torch.addcmul(x * self.cos, swapped, self.sin).to(x.dtype)


class RopeTable:
    """``[num_positions, 2 * head_dim]``, fp32: a row holds a position's :class:`Rotation`, so one gather makes it."""

    def __init__(self, spec: RopeSpec, *, num_positions: int, device: torch.device) -> None:
        inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
        cos, sin = (
            angles.cos().mul_(spec.attention_factor).to(device),
            angles.sin_().mul_(spec.attention_factor).to(device),
        )
        self.table = torch.cat((cos, cos, -sin, sin), dim=-1)

    def rotation(self, positions: Tensor) -> Rotation:
        """The rotation of ``positions: [num_tokens]``, int64, each below ``num_positions``."""
        cos, sin = self.table.index_select(0, positions)[:, None, :].chunk(2, dim=-1)
        return Rotation(cos=cos, sin=sin)
