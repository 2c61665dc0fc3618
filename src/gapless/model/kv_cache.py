"""The paged KV cache's tensors: one pair of K and V for each layer, addressed by slot.

``slot = block * block_size + offset``. Block 0 is reserved: padding writes there, unused block-table entries name it,
and the block pool never hands it out. The tensors are device state, touched on the compute stream only.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["KVCache", "KVShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """What one token of context costs: its layers, KV heads and head size."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V over all layers for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """``keys[i]`` and ``values[i]``: ``[(num_blocks + 1) * block_size, num_kv_heads, head_dim]`` of layer ``i``."""

    def __init__(self, shape: KVShape, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        slots = (num_blocks + 1) * block_size
        size = (slots, shape.num_kv_heads, shape.head_dim)
        self.keys: list[Tensor] = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]
        self.values: list[Tensor] = [_zeros(size, shape.dtype, device) for _ in range(shape.num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(t.nbytes for t in self.keys) + sum(t.nbytes for t in self.values)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, so that a slot nobody has written holds finite numbers.

    On a CPU the memory comes from NumPy, which takes pages that the kernel zeroes when they are first touched: a
    cache of gigabytes is there at once (torch's own zeros write every byte), and what is never used costs nothing.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(size)
