# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Matrix products of few tokens that also do the work around them: :func:`fused_residual` and :func:`fused_gate`.

The idea: a decode step is a long chain of small kernels, and each one's ends cost some microseconds: the slowest
program, the next launch, the first bytes. So what follows a product is done where its sums are finished, in registers:
the residual add, the next norm's weight and its sums of squares; the norm's scale and the gate.

An RMS norm is thereby cut in two, since its scale commutes with the product that follows: the producer multiplies by
the weight and sums squares, the consumer scales its sums (:class:`gapless.layers.ops.PreparedNorm`).

Where programs share a tile's inner axis (see ``skinny``), each leaves its partial sums, and the last one to arrive adds
them in a fixed order and goes on: which comes last varies, the sum does not. ``arrivals``, the count of programs that
have come, is zero between kernels; its owner is whoever makes the calls, on the compute stream. Reference:
:class:`gapless.layers.ops.TorchOps`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.dependent_launch import dependent_launch_options
from gapless.kernels.launch import launch_kernel
from gapless.kernels.skinny import SkinnyTile, checked_tokens, tile_sums
from gapless.layers.ops import PreparedNorm

__all__ = ["MAX_ARRIVALS", "fused_gate", "fused_residual", "partial_sums"]

MAX_ARRIVALS = 4096
"""Entries that ``arrivals`` must have: most tiles of a product whose inner axis is split."""


@triton.jit
def _norm_scale(squares, num_tokens, eps, SIZE: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """``1 / sqrt(mean square + eps)`` of each token, from its ``PARTS`` sums of squares; all are loaded at once."""
    # Called before the product's loop, so that these loads and its first ones are on their way together.
    PADDED: tl.constexpr = triton.next_power_of_2(PARTS)
    m = tl.minimum(tl.arange(0, TOKENS), num_tokens - 1)
    part = tl.arange(0, PADDED)
    parts = tl.load(squares + part[:, None] * num_tokens + m[None, :], mask=(part < PARTS)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(parts, 0) / SIZE + eps)


@triton.jit(do_not_specialize=["num_tokens"])
def _residual_kernel(
    x,
    weight,
    bias,
    hidden,
    next_norm,
    weighted,
    squares,
    partials,
    arrivals,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    r = tl.arange(0, BLOCK_N)
    n = tile * BLOCK_N + r
    m = tl.arange(0, TOKENS)
    acc = tile_sums(x, weight, n, split, num_tokens, K, TOKENS, BLOCK_N, BLOCK_K, SPLITS, DEPENDENT_LAUNCH)

    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_N * TOKENS
        at = partials + tile * (SPLITS * SIZE) + r[:, None] * TOKENS + m[None, :]
        tl.store(at + split * SIZE, acc)
        # All threads' stores come before the count, and the count (acquire, release) before the last one's loads.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        acc = tl.zeros([BLOCK_N, TOKENS], tl.float32)
        for i in tl.static_range(SPLITS):
            # ".cg": written by other multiprocessors while this one ran, so not from its L1.
            acc += tl.load(at + i * SIZE, cache_modifier=".cg")

    if HAS_BIAS:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    live = (m < num_tokens)[None, :]
    stream_at = m.to(tl.int64)[None, :] * N + n[:, None]
    old = tl.load(hidden + stream_at, mask=live, other=0.0)
    new = (old.to(tl.float32) + acc).to(old.dtype)
    tl.store(hidden + stream_at, new, mask=live)
    wide = new.to(tl.float32)
    w_norm = tl.load(next_norm + n).to(tl.float32)[:, None]
    tl.store(weighted + stream_at, (wide * w_norm).to(old.dtype), mask=live)
    tl.store(squares + tile * num_tokens + m, tl.sum(wide * wide, 0), mask=m < num_tokens)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_kernel(
    x,
    squares,
    weight,
    out,
    num_tokens,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, TOKENS)
    k = tl.arange(0, BLOCK_K)
    x_at = x + tl.minimum(m, num_tokens - 1)[None, :] * K + k[:, None]
    gate_at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    up_at = gate_at + N * K
    if DEPENDENT_LAUNCH:
        gdc_wait()
    if NUM_SQUARES > 0:
        scale = _norm_scale(squares, num_tokens, eps, K, TOKENS, NUM_SQUARES)[None, :]
    gate = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    up = tl.zeros([BLOCK_N, TOKENS], tl.float32)
    for _ in range(0, K, BLOCK_K):
        tokens = tl.load(x_at)
        gate = tl.dot(tl.load(gate_at, eviction_policy="evict_first"), tokens, gate, input_precision="ieee")
        up = tl.dot(tl.load(up_at, eviction_policy="evict_first"), tokens, up, input_precision="ieee")
        x_at += BLOCK_K
        gate_at += BLOCK_K
        up_at += BLOCK_K
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    if NUM_SQUARES > 0:
        gate *= scale
        up *= scale
    # Rounded where separate operations round: after the products, and after the gate.
    dtype = out.dtype.element_ty
    g = gate.to(dtype).to(tl.float32)
    silu = (g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32)
    result = (silu * up.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + m.to(tl.int64)[None, :] * N + n[:, None], result, mask=(m < num_tokens)[None, :])


def fused_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    next_norm: Tensor,
    arrivals: Tensor,
    tile: SkinnyTile,
    *,
    dependent: bool = False,
) -> PreparedNorm:
    """``hidden += x @ weight.T + bias`` in place, rounded once, and the next norm begun.

    Args:
        x: ``[num_tokens, in_features]``, contiguous, at most 128 tokens.
        weight: ``[hidden_size, in_features]``, contiguous.
        bias: ``[hidden_size]`` or ``None``.
        hidden: ``[num_tokens, hidden_size]``, contiguous.
        next_norm: ``[hidden_size]``.
        arrivals: ``[MAX_ARRIVALS]``, int32, zero; zero again afterwards.
        tile: one that fits the weight.
        dependent: launched early.
    """
    num_tokens, in_features = x.shape
    hidden_size = weight.shape[0]
    tokens = checked_tokens(x, weight, tile)
    assert hidden.is_contiguous()
    num_tiles = hidden_size // tile.block_n
    assert num_tiles <= MAX_ARRIVALS
    weighted = torch.empty_like(hidden)
    squares = torch.empty((num_tiles, num_tokens), dtype=torch.float32, device=x.device)
    launch_kernel(
        _residual_kernel,
        (num_tiles, tile.splits),
        x,
        weight,
        weight if bias is None else bias,
        hidden,
        next_norm,
        weighted,
        squares,
        partial_sums(num_tiles, tile.splits, tile.block_n * tokens, x.device),
        arrivals,
        num_tokens,
        N=hidden_size,
        K=in_features,
        TOKENS=tokens,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLITS=tile.splits,
        HAS_BIAS=bias is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch_options(on=dependent),
    )
    return PreparedNorm(weighted, squares)


def fused_gate(
    x: Tensor, squares: Tensor | None, weight: Tensor, eps: float, tile: SkinnyTile, *, dependent: bool = False
) -> Tensor:
    """``silu(x @ gate.T) * (x @ up.T)``, ``[num_tokens, size]``, rounded where separate operations would round.

    Args:
        x: ``[num_tokens, hidden_size]``, contiguous, at most 128 tokens: normed, or weighted if ``squares`` are given.
        squares: ``[num_parts, num_tokens]``, fp32: of a :class:`PreparedNorm`.
        weight: ``[2 * size, hidden_size]``, contiguous: gate above up.
        eps: of the norm.
        tile: one without splits that fits ``size`` rows.
        dependent: launched early.
    """
    num_tokens, hidden_size = x.shape
    size = weight.shape[0] // 2
    assert tile.splits == 1
    assert size % tile.block_n == 0
    tokens = checked_tokens(x, weight, tile)
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    launch_kernel(
        _gate_kernel,
        (size // tile.block_n,),
        x,
        x if squares is None else squares,
        weight,
        out,
        num_tokens,
        eps,
        N=size,
        K=hidden_size,
        TOKENS=tokens,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        NUM_SQUARES=0 if squares is None else len(squares),
        DEPENDENT_LAUNCH=dependent,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **dependent_launch_options(on=dependent),
    )
    return out


def partial_sums(num_tiles: int, splits: int, tile_size: int, device: torch.device) -> Tensor:
    """Memory for the partial sums of tiles whose inner axis is split, each of ``tile_size`` numbers."""
    size = num_tiles * splits * tile_size if splits > 1 else 0
    return torch.empty(size, dtype=torch.float32, device=device)
