# Kernel bodies are Gluon, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Matrix products of few tokens whose weights are on their way before the kernel may begin; for Hopper GPUs.

The idea: a product of few tokens is one pass over its weights, and what it loses, it loses at its ends: between kernels
the memory stands still for some microseconds. Weights depend on nothing. So each program, launched while the kernel
before still runs, fills a *ring* of weight tiles in shared memory first, and only then waits for that kernel and asks
for the tokens; from then on every emptied stage is filled anew. A ring takes more than half of a multiprocessor's
shared memory: two programs beside each other on one would have to share its port to the L2 cache, and be late.

Loads that begin on one side of a wait and end on the other cannot be said in Triton; hence Gluon, its lower language,
with TMA copies and their barriers. What the kernels do with the sums is what those of ``skinny`` and ``fused_products``
do, which are their forms for other devices and other shapes, and the reference that tests compare them with besides
plain torch. Which products are done here is in the tuned table.

Sums over a split inner axis are added by the last program to arrive, in a fixed order: equal inputs give equal bits. No
state; runs on the compute stream. Needs compute capability 9.0.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.dependent_launch import dependent_launch_options
from gapless.kernels.fused_products import MAX_ARRIVALS, partial_sums
from gapless.kernels.launch import launch_kernel
from gapless.kernels.skinny import checked_tokens
from gapless.kernels.tma_boxes import boxes_of
from gapless.kernels.tuned_table import StreamedTile
from gapless.layers.ops import PreparedNorm

__all__ = ["streamed_gate", "streamed_product", "streamed_residual"]

_ROWS = gl.constexpr(StreamedTile.ROWS)
_STEP = gl.constexpr(StreamedTile.STEP)
_NUM_WARPS = 4  # one warp group, which one tensor-core instruction of 64 rows takes


@gluon.jit
def _load(weight, x, ring, step, row, k, SECOND: gl.constexpr, WEIGHTS: gl.constexpr, TOKENS: gl.constexpr):
    """Start copying a step's weights, its tokens, or both, into the step's stage.

    The weights are one box of rows from ``row`` on, or two, the other ``SECOND`` rows further. A stage is full when all
    that it expects has come, which is said with the weights.
    """
    w, t, bars = ring
    STAGES: gl.constexpr = t.shape[0]
    BOXES: gl.constexpr = w.shape[0] // STAGES
    stage = step % STAGES
    bar = bars.index(stage)
    if WEIGHTS:
        mbarrier.expect(bar, (BOXES * _ROWS + t.shape[1]) * _STEP * 2)
        tma.async_copy_global_to_shared(weight, [row, k + step * _STEP], bar, w.index(BOXES * stage))
        if BOXES == 2:
            tma.async_copy_global_to_shared(weight, [row + SECOND, k + step * _STEP], bar, w.index(BOXES * stage + 1))
    if TOKENS:
        tma.async_copy_global_to_shared(x, [0, k + step * _STEP], bar, t.index(stage))


@gluon.jit
def _start(
    weight, x, row, k, STEPS: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr
):
    """Fill the ring: weights, then, once the kernel before has ended, tokens; let the next kernel start."""
    BOXES: gl.constexpr = 2 if SECOND > 0 else 1
    w = gl.allocate_shared_memory(gl.bfloat16, [BOXES * STAGES, _ROWS, _STEP], weight.layout)
    t = gl.allocate_shared_memory(gl.bfloat16, [STAGES, x.block_shape[0], _STEP], x.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ring = (w, t, bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(min(STAGES, STEPS)):
        _load(weight, x, ring, i, row, k, SECOND, WEIGHTS=True, TOKENS=False)
    if DEPENDENT_LAUNCH:
        gdc_wait()
    for i in gl.static_range(min(STAGES, STEPS)):
        _load(weight, x, ring, i, row, k, SECOND, WEIGHTS=False, TOKENS=True)
    if DEPENDENT_LAUNCH:
        gdc_launch_dependents()
    return ring


@gluon.jit
def _sums(weight, x, ring, row, k, STEPS: gl.constexpr, SECOND: gl.constexpr):
    """Products of one box of rows, or of two, with the tokens: ``[64, tokens]``, fp32, twice."""
    w, t, bars = ring
    STAGES: gl.constexpr = t.shape[0]
    BOXES: gl.constexpr = w.shape[0] // STAGES
    NUM_TOKENS: gl.constexpr = t.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, NUM_TOKENS, 16]
    )
    first = gl.zeros([_ROWS, NUM_TOKENS], gl.float32, layout)
    second = gl.zeros([_ROWS, NUM_TOKENS], gl.float32, layout)
    for step in range(STEPS):
        stage = step % STAGES
        mbarrier.wait(bars.index(stage), step // STAGES & 1)
        tokens = t.index(stage).permute((1, 0))
        first = warpgroup_mma(w.index(BOXES * stage), tokens, first, is_async=True)
        if BOXES == 2:
            second = warpgroup_mma(w.index(BOXES * stage + 1), tokens, second, is_async=True)
        # Memory is the bound, so the stage is emptied at once; a product kept in flight would keep it from filling.
        first, second = warpgroup_mma_wait(num_outstanding=0, deps=(first, second))
        if step + STAGES < STEPS:
            _load(weight, x, ring, step + STAGES, row, k, SECOND, WEIGHTS=True, TOKENS=True)
    return first, second


@gluon.jit
def _by_rows(values):
    """Sums laid out so that threads hold neighbouring rows, which lie side by side in memory."""
    layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    return gl.convert_layout(values, layout)


@gluon.jit(do_not_specialize=["num_tokens"])
def _product_kernel(
    weight, x, out, num_tokens,
    N: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0) * _ROWS
    split = gl.program_id(1)
    STEPS: gl.constexpr = K // SPLITS // _STEP
    k = split * (K // SPLITS)
    ring = _start(weight, x, row, k, STEPS, 0, STAGES, DEPENDENT_LAUNCH)
    total, _ = _sums(weight, x, ring, row, k, STEPS, 0)
    total = _by_rows(total)
    n = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, total.type.layout))
    m = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    at = (split * num_tokens + m).to(gl.int64)[None, :] * N + n[:, None]
    gl.store(out + at, total.to(out.dtype.element_ty), mask=(m < num_tokens)[None, :])


@gluon.jit(do_not_specialize=["num_tokens"])
def _residual_kernel(
    weight, x, bias, hidden, next_norm, weighted, squares, partials, arrivals, num_tokens,
    N: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    tile = gl.program_id(0)
    split = gl.program_id(1)
    row = tile * _ROWS
    STEPS: gl.constexpr = K // SPLITS // _STEP
    k = split * (K // SPLITS)
    ring = _start(weight, x, row, k, STEPS, 0, STAGES, DEPENDENT_LAUNCH)
    total, _ = _sums(weight, x, ring, row, k, STEPS, 0)
    total = _by_rows(total)
    r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, total.type.layout))
    m = gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    n = row + r
    live = (m < num_tokens)[None, :]
    stream_at = m.to(gl.int64)[None, :] * N + n[:, None]
    # Whichever program arrives last needs them: on their way while the others are waited for.
    old = gl.load(hidden + stream_at, mask=live, other=0.0).to(gl.float32)
    w_norm = gl.load(next_norm + n).to(gl.float32)[:, None]
    if SPLITS > 1:
        SIZE: gl.constexpr = _ROWS * total.shape[1]
        at = partials + tile * (SPLITS * SIZE) + m[None, :] * _ROWS + r[:, None]
        gl.store(at + split * SIZE, total)
        # All threads' stores come before the count, and the count (acquire, release) before the last one's loads.
        gl.thread_barrier()
        if gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        gl.store(arrivals + tile, 0)
        # ".cg": written by other multiprocessors while this one ran, so not from its L1.
        total = gl.load(at, cache_modifier=".cg")
        for i in gl.static_range(1, SPLITS):
            total += gl.load(at + i * SIZE, cache_modifier=".cg")
    if HAS_BIAS:
        total += gl.load(bias + n).to(gl.float32)[:, None]
    new = (old + total).to(gl.bfloat16)
    gl.store(hidden + stream_at, new, mask=live)
    wide = new.to(gl.float32)
    gl.store(weighted + stream_at, (wide * w_norm).to(gl.bfloat16), mask=live)
    gl.store(squares + tile * num_tokens + m, gl.sum(wide * wide, 0), mask=m < num_tokens)


@gluon.jit
def _norm_scale(squares, num_tokens, eps, SIZE: gl.constexpr, TOKENS: gl.constexpr, PARTS: gl.constexpr):
    """``1 / sqrt(mean square + eps)`` of each token, from its ``PARTS`` sums of squares."""
    WIDE: gl.constexpr = min(TOKENS, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [gl.num_warps(), 1], [1, 0])
    part = gl.arange(0, triton.next_power_of_2(PARTS), layout=gl.SliceLayout(1, layout))
    m = gl.minimum(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout)), num_tokens - 1)
    at = squares + part[:, None] * num_tokens + m[None, :]
    parts = gl.load(at, mask=(part < PARTS)[:, None], other=0.0)
    return gl.rsqrt(gl.sum(parts, 0) / SIZE + eps)


@gluon.jit(do_not_specialize=["num_tokens"])
def _gate_kernel(
    weight, x, squares, out, num_tokens, eps,
    N: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, NUM_SQUARES: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    row = gl.program_id(0) * _ROWS
    STEPS: gl.constexpr = K // _STEP
    ring = _start(weight, x, row, 0, STEPS, N, STAGES, DEPENDENT_LAUNCH)
    if NUM_SQUARES > 0:
        # Before the sums, so that these loads and the tokens' first ones are on their way together.
        scale = _norm_scale(squares, num_tokens, eps, K, x.block_shape[0], NUM_SQUARES)
    gate, up = _sums(weight, x, ring, row, 0, STEPS, N)
    gate = _by_rows(gate)
    up = _by_rows(up)
    if NUM_SQUARES > 0:
        factor = gl.convert_layout(scale, gl.SliceLayout(0, gate.type.layout))[None, :]
        gate *= factor
        up *= factor
    # Rounded where separate operations round: after the products, and after the gate.
    g = gate.to(gl.bfloat16).to(gl.float32)
    silu = (g / (1.0 + gl.exp(-g))).to(gl.bfloat16).to(gl.float32)
    result = (silu * up.to(gl.bfloat16).to(gl.float32)).to(gl.bfloat16)
    n = row + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, gate.type.layout))
    m = gl.arange(0, gate.shape[1], layout=gl.SliceLayout(0, gate.type.layout))
    gl.store(out + m.to(gl.int64)[None, :] * N + n[:, None], result, mask=(m < num_tokens)[None, :])


def streamed_product(x: Tensor, weight: Tensor, out: Tensor, tile: StreamedTile, *, dependent: bool = False) -> None:
    """:func:`gapless.kernels.skinny.skinny_product` for bf16, at most 64 tokens and a tile of this module."""
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert out.is_contiguous()
    assert out.shape == (tile.splits, num_tokens, out_features)
    launch_kernel(
        _product_kernel,
        (out_features // StreamedTile.ROWS, tile.splits),
        *_boxes(weight, x, tile),
        out,
        num_tokens,
        N=out_features,
        K=in_features,
        SPLITS=tile.splits,
        STAGES=tile.num_stages,
        DEPENDENT_LAUNCH=dependent,
        num_warps=_NUM_WARPS,
        **dependent_launch_options(on=dependent),
    )


def streamed_residual(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    next_norm: Tensor,
    arrivals: Tensor,
    tile: StreamedTile,
    *,
    dependent: bool = False,
) -> PreparedNorm:
    """:func:`gapless.kernels.fused_products.fused_residual` for bf16, at most 64 tokens and a tile of this module."""
    num_tokens, in_features = x.shape
    hidden_size = weight.shape[0]
    assert hidden.is_contiguous()
    num_tiles = hidden_size // StreamedTile.ROWS
    assert num_tiles <= MAX_ARRIVALS
    boxes = _boxes(weight, x, tile)
    weighted = torch.empty_like(hidden)
    squares = torch.empty((num_tiles, num_tokens), dtype=torch.float32, device=x.device)
    launch_kernel(
        _residual_kernel,
        (num_tiles, tile.splits),
        *boxes,
        weight if bias is None else bias,
        hidden,
        next_norm,
        weighted,
        squares,
        partial_sums(num_tiles, tile.splits, StreamedTile.ROWS * boxes[1].block_shape[0], x.device),
        arrivals,
        num_tokens,
        N=hidden_size,
        K=in_features,
        SPLITS=tile.splits,
        STAGES=tile.num_stages,
        HAS_BIAS=bias is not None,
        DEPENDENT_LAUNCH=dependent,
        num_warps=_NUM_WARPS,
        **dependent_launch_options(on=dependent),
    )
    return PreparedNorm(weighted, squares)


def streamed_gate(
    x: Tensor, squares: Tensor | None, weight: Tensor, eps: float, tile: StreamedTile, *, dependent: bool = False
) -> Tensor:
    """:func:`gapless.kernels.fused_products.fused_gate` for bf16, at most 64 tokens and a tile of this module."""
    num_tokens, hidden_size = x.shape
    size = weight.shape[0] // 2
    assert tile.splits == 1
    assert size % StreamedTile.ROWS == 0
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    launch_kernel(
        _gate_kernel,
        (size // StreamedTile.ROWS,),
        *_boxes(weight, x, tile),
        x if squares is None else squares,
        out,
        num_tokens,
        eps,
        N=size,
        K=hidden_size,
        STAGES=tile.num_stages,
        NUM_SQUARES=0 if squares is None else len(squares),
        DEPENDENT_LAUNCH=dependent,
        num_warps=_NUM_WARPS,
        **dependent_launch_options(on=dependent),
    )
    return out


def _boxes(weight: Tensor, x: Tensor, tile: StreamedTile) -> tuple[TensorDescriptor, TensorDescriptor]:
    """How TMA reads the weight and the tokens, of which those past the last are zeros; checks that it can."""
    tokens = checked_tokens(x, weight, tile)
    assert x.dtype == weight.dtype == torch.bfloat16
    return boxes_of(weight, StreamedTile.ROWS, StreamedTile.STEP), boxes_of(x, tokens, StreamedTile.STEP)
