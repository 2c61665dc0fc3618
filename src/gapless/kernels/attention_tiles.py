"""The tiles that attention is cut into: sizes, and which are the default for a head's size and a dtype.

Sizes were measured on an H200 (``benchmarks/kernels/paged_attention.py``). No state.
"""

from dataclasses import dataclass

import torch
import triton

__all__ = ["WHOLE_TILE", "TileShape", "default_decode_tile", "default_prefill_tile", "padded_dim", "tile_rows"]

# The large decode tile was tried where a program may have 227 KiB, as on Hopper; nobody has on smaller devices.
_LARGE_SHARED_MEMORY = 160 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TileShape:
    """Launch settings of one class of entries.

    Attributes:
        rows: query rows of a tile (query tokens x query heads of a KV head); raised to one token's heads where needed.
        keys: keys of a tile.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline over key tiles.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# The one tile of ``prefill_attention``; its warps are those of each of two groups.
WHOLE_TILE = TileShape(rows=128, keys=128, num_warps=4, num_stages=2)


def default_decode_tile(head_dim: int, dtype: torch.dtype, *, shared_memory_bytes: int = 0) -> TileShape:
    """Tiles for decode, which reads K and V once and is bound by bandwidth.

    16 rows are the smallest tensor-core tile. 128 keys of 128 bf16 numbers are 64 KiB of K and V; with three stages
    Triton 3.6 keeps one such tile in 74,240 bytes of shared memory, which is enough for one program to saturate its
    share of an H200 (32 contexts of 4352: 4.0 TB/s, against 3.1 with three programs of 64 keys beside each other).
    Devices with less shared memory than was tried get the smaller tiles.

    Args:
        head_dim: of K and V.
        dtype: of K and V.
        shared_memory_bytes: what one program may use.
    """
    padded = padded_dim(head_dim)
    if dtype == torch.float32:
        return _float32_tile(padded)
    if shared_memory_bytes >= _LARGE_SHARED_MEMORY:
        return TileShape(rows=16, keys=min(128, max(16, 16384 // padded)), num_warps=4, num_stages=3)
    return TileShape(rows=16, keys=min(128, max(16, 8192 // padded)), num_warps=4, num_stages=5)


def default_prefill_tile(head_dim: int, dtype: torch.dtype) -> TileShape:
    """Tiles for prefill, which is bound by the tensor cores: two warp groups on 128 rows, 64 where registers run out.

    Five stages for the same reason as in decode: with three, K has one buffer and loads wait for the product.
    """
    padded = padded_dim(head_dim)
    if dtype == torch.float32:
        return _float32_tile(padded)
    if padded > 128:
        return TileShape(rows=64, keys=32, num_warps=8, num_stages=3)
    return TileShape(rows=128, keys=64, num_warps=8, num_stages=5)


def _float32_tile(padded: int) -> TileShape:
    """Exact fp32 products run outside the tensor cores with operands in registers: larger tiles spill."""
    return TileShape(rows=16, keys=min(64, max(16, 4096 // padded)), num_warps=8, num_stages=2)


def padded_dim(head_dim: int) -> int:
    """The power of two that a head's elements are padded to inside the kernel."""
    padded: int = max(16, triton.next_power_of_2(head_dim))
    return padded


def tile_rows(tile: TileShape, group: int) -> int:
    """Rows of a tile: at least one token with all heads of its group."""
    rows: int = max(tile.rows, triton.next_power_of_2(group))
    return rows
