# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The work between a layer's matrix products, one launch each.

The idea: in a decode step of some tens of tokens, every launch costs more than the bytes it moves, so residual add
and norm are one kernel, QK-norm, rotation and the cache write another, and the gate a third. Steps of few tokens do
without most of them (see ``fused_products``). Sums are fp32; a row is reduced by one program in a fixed order, so equal
rows give equal bits. References: the functions of the same names in :mod:`gapless.layers`. No state; runs on the
compute stream.

Each kernel lets the next one start before it waits itself: what that one reads before its own wait is older than the
step's first kernel.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.dependent_launch import dependent_launch_options
from gapless.kernels.launch import launch_kernel
from gapless.layers.ops import Residual
from gapless.layers.rope import Rotation

__all__ = ["add_rms_norm", "rotate_and_write", "silu_and_mul"]

_GATE_BLOCK = 1024
_ROTATED_ROWS = 16
"""Heads x tokens that a program of ``rotate_and_write`` does. With one for each head, long steps are bound by the rate
at which programs start: some 400,000 with 8,192 tokens (475 us, at a tenth of the bandwidth)."""


# The least one that is not below. Functions of Triton that kernels may call too take half as long as a launch.
_power_of_2 = functools.cache(triton.next_power_of_2)


@triton.jit
def _add_rms_norm_kernel(
    hidden,
    delta,
    weight,
    out,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    c = tl.arange(0, PADDED)
    inside = c < SIZE
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    x = tl.load(hidden + row + c, mask=inside, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta + row + c, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(hidden + row + c, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    tl.store(out + row + c, (wide * scale * w).to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_write_kernel(
    qkv,
    squares,
    bias,
    qk_norm,
    cos,
    sin,
    q,
    keys,
    values,
    slots,
    num_tokens,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    ROTATION_STRIDE: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    NUM_ADDENDS: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    # A program does some tokens, a row for each of HEADS neighbouring heads: all of them queries, or keys, or values. A
    # head is handled as its two halves, which rotation pairs.
    first_head = tl.program_id(1) * HEADS
    DIM: tl.constexpr = 2 * HALF
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    r = tl.arange(0, ROWS)
    token = tl.program_id(0).to(tl.int64) * (ROWS // HEADS) + r // HEADS
    head = first_head + r % HEADS
    d = tl.arange(0, PADDED_HALF)
    live = token < num_tokens
    inside = live[:, None] & (d < HALF)[None, :]
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    a = tl.zeros([ROWS, PADDED_HALF], tl.float32)
    b = tl.zeros([ROWS, PADDED_HALF], tl.float32)
    for i in tl.static_range(NUM_ADDENDS):
        source = qkv + (((i * num_tokens + token) * ALL_HEADS + head) * DIM)[:, None] + d[None, :]
        a += tl.load(source, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if NUM_SQUARES > 0:
        part = tl.arange(0, triton.next_power_of_2(NUM_SQUARES))
        sums = tl.load(
            squares + part[None, :] * num_tokens + token[:, None],
            mask=live[:, None] & (part < NUM_SQUARES)[None, :],
            other=0.0,
        )
        root = tl.rsqrt(tl.sum(sums, 1) / HIDDEN_SIZE + eps)
        a *= root[:, None]
        b *= root[:, None]
    if HAS_BIAS:
        at = bias + (head * DIM)[:, None] + d[None, :]
        a += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    # Rounded as the product itself would be, however many addends it came in.
    low = a.to(q.dtype.element_ty)
    high = b.to(q.dtype.element_ty)
    if first_head < NUM_HEADS + NUM_KV_HEADS:
        a = low.to(tl.float32)
        b = high.to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)[:, None]
            # Rounded as the reference rounds: after the scale, and after the weight.
            at = qk_norm + (head * DIM)[:, None] + d[None, :]
            wa = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            wb = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
            a = ((a * scale).to(low.dtype).to(tl.float32) * wa).to(low.dtype).to(tl.float32)
            b = ((b * scale).to(low.dtype).to(tl.float32) * wb).to(low.dtype).to(tl.float32)
        # The table's sine is negated in its first half.
        angle = (token * ROTATION_STRIDE)[:, None] + d[None, :]
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle + HALF, mask=inside, other=0.0)
        low = (a * c - b * s).to(low.dtype)
        high = (b * c + a * s).to(high.dtype)
    if first_head < NUM_HEADS:
        target = q + ((token * NUM_HEADS + head) * DIM)[:, None] + d[None, :]
    else:
        slot = tl.load(slots + token, mask=live, other=0) * (NUM_KV_HEADS * DIM)
        if first_head < NUM_HEADS + NUM_KV_HEADS:
            target = keys + (slot + (head - NUM_HEADS) * DIM)[:, None] + d[None, :]
        else:
            target = values + (slot + (head - NUM_HEADS - NUM_KV_HEADS) * DIM)[:, None] + d[None, :]
    tl.store(target, low, mask=inside)
    tl.store(target + HALF, high, mask=inside)


@triton.jit
def _silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + token * 2 * SIZE + c, mask=inside, other=0.0)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + c, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    # Rounded between the two products, as the reference is.
    silu = (g / (1.0 + tl.exp(-g))).to(gate.dtype)
    tl.store(out + token * SIZE + c, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def add_rms_norm(residual: Residual, weight: Tensor, eps: float, *, dependent: bool = False) -> Tensor:
    """See :func:`gapless.layers.ops.add_rms_norm`. ``dependent``: launched early."""
    hidden, delta = residual.hidden, residual.delta
    assert hidden.is_contiguous()
    assert delta is None or delta.is_contiguous()
    num_tokens, size = hidden.shape
    out = torch.empty_like(hidden)
    if num_tokens == 0:
        return out
    padded = _power_of_2(size)
    launch_kernel(
        _add_rms_norm_kernel,
        (num_tokens,),
        hidden,
        hidden if delta is None else delta,
        weight,
        out,
        eps,
        SIZE=size,
        PADDED=padded,
        HAS_DELTA=delta is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=min(max(padded // 512, 1), 16),
        **dependent_launch_options(on=dependent),
    )
    return out


def rotate_and_write(
    qkv: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    rotation: Rotation,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    squares: Tensor | None = None,
    bias: Tensor | None = None,
    hidden_size: int = 0,
    dependent: bool = False,
) -> Tensor:
    """See :func:`gapless.layers.ops.rotate_and_write`; also finishes the product that made ``qkv``.

    Args:
        qkv: addends, ``[num_addends, num_tokens, num_heads + 2 * num_kv_heads, head_dim]``, dtype of ``keys`` or fp32.
        qk_norm, eps, rotation, keys, values, slots: as there.
        squares: ``[num_parts, num_tokens]``, fp32, of a prepared norm over ``hidden_size`` whose scale is missing.
        bias: ``[(num_heads + 2 * num_kv_heads) * head_dim]``, to be added after that.
        dependent: launched early.
    """
    assert qkv.is_contiguous()
    assert keys.is_contiguous()
    assert rotation.cos.stride(0) == rotation.sin.stride(0)
    assert values.is_contiguous()
    num_addends, num_tokens, all_heads, head_dim = qkv.shape
    num_kv_heads = keys.shape[1]
    num_heads = all_heads - 2 * num_kv_heads
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=keys.dtype, device=qkv.device)
    half = head_dim // 2
    heads = math.gcd(num_kv_heads, _ROTATED_ROWS)  # neighbours; it divides the number of query heads too
    tokens = _ROTATED_ROWS // heads
    launch_kernel(
        _rotate_and_write_kernel,
        (-(-num_tokens // tokens), all_heads // heads),
        *(qkv, qkv if squares is None else squares, qkv if bias is None else bias),
        *(qkv if qk_norm is None else qk_norm, rotation.cos, rotation.sin),
        *(q, keys, values, slots, num_tokens, eps),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        HEADS=heads,
        ROWS=_ROTATED_ROWS,
        ROTATION_STRIDE=rotation.cos.stride(0),
        PADDED_HALF=_power_of_2(half),
        NUM_ADDENDS=num_addends,
        NUM_SQUARES=0 if squares is None else len(squares),
        HIDDEN_SIZE=hidden_size,
        HAS_BIAS=bias is not None,
        HAS_NORM=qk_norm is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=_ROTATED_ROWS // 4,
        **dependent_launch_options(on=dependent),
    )
    return q


def silu_and_mul(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    """See :func:`gapless.layers.activation.silu_and_mul`. ``dependent``: launched early."""
    assert gate_up.is_contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_tokens, -(-size // _GATE_BLOCK))
    launch_kernel(
        _silu_and_mul_kernel,
        grid,
        gate_up,
        out,
        SIZE=size,
        BLOCK=_GATE_BLOCK,
        DEPENDENT_LAUNCH=dependent,
        num_warps=4,
        **dependent_launch_options(on=dependent),
    )
    return out
