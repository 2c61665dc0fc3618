# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Matrix products of few tokens, which are bound by reading the weights: tiles, and :func:`skinny_product`.

The idea: with some tens of tokens, a product is one pass over its weights, and its speed is how evenly that pass keeps
all multiprocessors reading. The weight is the *left* operand of the tensor core, whose tile is 64 rows high, and the
tokens are the narrow right one, held by one tile, so that weights are read once. Narrow matrices have too few tiles to
fill the device, so programs may share a tile's inner axis; each leaves an *addend*, and the kernel that reads the
result adds them in their order: no atomic adds, so equal inputs give equal bits. ``fused_products`` has the products
that do more than multiply.

The next kernel is let go when the sums are done, not at the start: its programs would settle two by two where this
kernel has left room, and leave the other multiprocessors idle. ``streamed_products`` can let it go at the start.

Tiles come from a table (see ``tuned_table``): which are fast depends on the shape and the device. No state; runs on the
compute stream.
"""

from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.dependent_launch import dependent_launch_options
from gapless.kernels.launch import launch_kernel

__all__ = ["MAX_SKINNY_TOKENS", "SkinnyTile", "checked_tokens", "padded_tokens", "skinny_product", "tile_sums"]

MAX_SKINNY_TOKENS = 128
"""Most tokens of a skinny product: one tile holds them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkinnyTile:
    """Launch settings.

    Attributes:
        block_n: weight rows of a program; where it has gate and up, of each.
        block_k: length of a step along the inner axis.
        splits: programs that share the inner axis of a tile.
        num_warps, num_stages: as Triton means them.
    """

    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    def fits(self, out_features: int, in_features: int) -> bool:
        """Whether the tile divides a matrix evenly, as the kernels demand."""
        return out_features % self.block_n == 0 and in_features % (self.block_k * self.splits) == 0


def padded_tokens(num_tokens: int) -> int | None:
    """Width of the tile that holds ``num_tokens``: 16, 32, 64 or 128; ``None`` if they are too many."""
    return next((width for width in (16, 32, 64, MAX_SKINNY_TOKENS) if num_tokens <= width), None)


class FittingTile(Protocol):
    """A tile of any kernel."""

    def fits(self, out_features: int, in_features: int) -> bool:
        """Whether it divides a matrix evenly, as its kernel demands."""
        ...


def checked_tokens(x: Tensor, weight: Tensor, tile: FittingTile) -> int:
    """Width of the tile that holds the tokens of ``x``, having checked that the product can be done."""
    tokens = padded_tokens(len(x))
    assert tokens is not None
    assert tile.fits(*weight.shape)
    assert x.is_contiguous()
    assert weight.is_contiguous()
    return tokens


@triton.jit
def tile_sums(
    x,
    weight,
    n,
    split,
    num_tokens,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Products of the weight's rows ``n: [BLOCK_N]`` over one split of the inner axis, ``[BLOCK_N, TOKENS]``, fp32."""
    m = tl.arange(0, TOKENS)
    k = split * (K // SPLITS) + tl.arange(0, BLOCK_K)
    # Tokens past the last are copies of it: loads without a mask, and nobody stores them.
    x_at = x + tl.minimum(m, num_tokens - 1)[None, :] * K + k[:, None]
    w_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if DEPENDENT_LAUNCH:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for _ in range(0, K // SPLITS, BLOCK_K):
        # Weights are read once and must not push the tokens out of the cache.
        w = tl.load(w_at, eviction_policy="evict_first")
        acc = tl.dot(w, tl.load(x_at), acc, input_precision="ieee")
        w_at += BLOCK_K
        x_at += BLOCK_K
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    x,
    weight,
    out,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    acc = tile_sums(x, weight, n, split, num_tokens, K, TOKENS, BLOCK_N, BLOCK_K, SPLITS, DEPENDENT_LAUNCH)
    m = tl.arange(0, TOKENS)
    at = (split * num_tokens + m).to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(m < num_tokens)[None, :])


def skinny_product(x: Tensor, weight: Tensor, out: Tensor, tile: SkinnyTile, *, dependent: bool = False) -> None:
    """``x @ weight.T`` as addends, each rounded once, to the dtype of ``out``.

    Args:
        x: ``[num_tokens, in_features]``, contiguous, at most :data:`MAX_SKINNY_TOKENS` tokens.
        weight: ``[out_features, in_features]``, contiguous, of the same dtype.
        out: ``[splits, num_tokens, out_features]``, contiguous, that dtype or fp32; its sum over the first axis is the
            product.
        tile: one that :meth:`SkinnyTile.fits` the weight.
        dependent: launched early.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    tokens = checked_tokens(x, weight, tile)
    assert out.is_contiguous()
    assert out.shape == (tile.splits, num_tokens, out_features)
    launch_kernel(
        _product_kernel,
        (out_features // tile.block_n, tile.splits),
        x,
        weight,
        out,
        num_tokens,
        N=out_features,
        K=in_features,
        TOKENS=tokens,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        DEPENDENT_LAUNCH=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch_options(on=dependent),
    )
