# Kernel bodies are Gluon, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Attention of long prompts with the tensor cores kept busy; for Hopper GPUs.

The idea is FlashAttention-3's (arXiv 2407.08608): a program's warps have different jobs. One warp *produces*: it copies
tiles of keys and values into a ring in shared memory by TMA, box by box as the block table says, for as far ahead as
the ring allows. Two warp groups *consume*: each has half of the tile's query rows and never waits for the other. While
the tensor cores multiply the weights of one tile with its values, the group forms the weights of the next one, whose
scores were asked for first. Triton cannot say who does what; hence Gluon, its lower language.

What is computed is what ``attend_tiles`` computes for work items that are whole tiles without a window; that kernel
does all other work, and is what this one is compared with besides plain torch. Everything is in a fixed order: equal
inputs give equal bits. No state; runs on the compute stream. Needs compute capability 9.0.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from gapless.kernels.attention_tiles import WHOLE_TILE
from gapless.kernels.dependent_launch import dependent_launch_options
from gapless.kernels.launch import launch_kernel
from gapless.kernels.tma_boxes import boxes_of
from gapless.kernels.work_list import ITEM_FIELDS, WorkList

__all__ = ["attend_tiles_whole", "can_attend_whole"]

_ROWS = gl.constexpr(WHOLE_TILE.rows)  # of a tile: query tokens x query heads of a KV head
_KEYS = gl.constexpr(WHOLE_TILE.keys)  # of a tile
_GROUP_ROWS = gl.constexpr(_ROWS.value // 2)  # of a warp group, which one tensor-core instruction takes
_SLOTS = gl.constexpr(16)  # of a box of TMA
_COLUMNS = gl.constexpr(64)  # of a box: 128 bytes are the widest that its swizzle allows
_STAGES = gl.constexpr(WHOLE_TILE.num_stages)
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _copy_boxes(source, table, boxes, stage, bar, head, start, end, num_slots, BLOCK_SIZE: gl.constexpr):
    """Start copying the keys, or values, ``[start, start + 128)`` of a context into a stage; zeros from ``end`` on.

    A box holds 16 slots of one block and 64 columns; the last one also what lies behind ``end`` in its block.
    """
    COUNT: gl.constexpr = _KEYS // _SLOTS
    PARTS: gl.constexpr = boxes.shape[0] // (_STAGES * COUNT)
    mbarrier.expect(bar, _KEYS * PARTS * _COLUMNS * 2)
    for i in gl.static_range(COUNT):
        key = start + i * _SLOTS
        inside = key < end
        block = gl.load(table + key // BLOCK_SIZE, mask=inside, other=0)
        # Rows past the tensor's end are zeros and read nothing.
        row = gl.where(inside, block * BLOCK_SIZE + key % BLOCK_SIZE, num_slots)
        for part in gl.static_range(PARTS):
            target = boxes.index((stage * PARTS + part) * COUNT + i)
            tma.async_copy_global_to_shared(source, [row, (head * PARTS + part) * _COLUMNS], bar, target)


@gluon.jit
def _clear_from(boxes, stage, start, end):
    """Zero the values' rows from ``end`` on in the box that ``end`` cuts: whatever they hold times 0 must be 0."""
    COUNT: gl.constexpr = _KEYS // _SLOTS
    PARTS: gl.constexpr = boxes.shape[0] // (_STAGES * COUNT)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    i = (end - start) // _SLOTS
    row = start + i * _SLOTS + gl.arange(0, _SLOTS, layout=gl.SliceLayout(1, layout))
    for part in gl.static_range(PARTS):
        box = boxes.index((stage * PARTS + part) * COUNT + i)
        box.store(gl.where((row < end)[:, None], box.load(layout), 0.0))


@gluon.jit
def _produce(keys, values, table, head, end, num_slots, rings, BLOCK_SIZE: gl.constexpr):
    """The producer's job: all tiles of keys and values, each as soon as its stage is free."""
    k_boxes, v_boxes, k_full, k_free, v_full, v_free, cut = rings
    for j in range((end + _KEYS - 1) // _KEYS):
        stage = j % _STAGES
        free = j // _STAGES & 1 ^ 1
        start = j * _KEYS
        mbarrier.wait(k_free.index(stage), free)
        _copy_boxes(keys, table, k_boxes, stage, k_full.index(stage), head, start, end, num_slots, BLOCK_SIZE)
        mbarrier.wait(v_free.index(stage), free)
        if start + _KEYS > end:
            _copy_boxes(values, table, v_boxes, stage, cut, head, start, end, num_slots, BLOCK_SIZE)
            mbarrier.wait(cut, 0)
            _clear_from(v_boxes, stage, start, end)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(v_full.index(stage), count=1)
        else:
            _copy_boxes(values, table, v_boxes, stage, v_full.index(stage), head, start, end, num_slots, BLOCK_SIZE)


@gluon.jit
def _weights(scores, row_max, row_sum, qk_scale, start, end, positions, MASKED: gl.constexpr):
    """One step of the online softmax: the weights of a tile, and how those before them decay."""
    layout: gl.constexpr = scores.type.layout
    scores = scores * qk_scale
    if MASKED:
        key = start + gl.arange(0, _KEYS, layout=gl.SliceLayout(0, layout))
        visible = (key < end)[None, :] & (key[None, :] <= positions[:, None])
        scores = gl.where(visible, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    weights = gl.exp2(scores - new_max[:, None])
    decay = gl.exp2(row_max - new_max)
    return weights, decay, new_max, row_sum * decay + gl.sum(weights, 1)


@gluon.jit
def _visit(q, k, v, rings, state, first, last, end, positions, qk_scale, MASKED: gl.constexpr):
    """The tiles ``[first, last)``; the weights of the tile before are at hand, and this one's will be."""
    _, _, k_full, k_free, v_full, v_free, _ = rings
    acc, weights, row_max, row_sum = state
    layout: gl.constexpr = acc.type.layout
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, _KEYS, 16])
    for j in range(first, last):
        stage = j % _STAGES
        before = (j - 1) % _STAGES
        mbarrier.wait(k_full.index(stage), j // _STAGES & 1)
        scores = gl.zeros([_GROUP_ROWS, _KEYS], gl.float32, score_layout)
        scores = warpgroup_mma(q, k.index(stage).permute((1, 0)), scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (j - 1) // _STAGES & 1)
        acc = warpgroup_mma(weights, v.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        gl.thread_barrier()
        mbarrier.arrive(k_free.index(stage), count=1)
        following, decay, row_max, row_sum = _weights(
            scores, row_max, row_sum, qk_scale, j * _KEYS, end, positions, MASKED
        )
        acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))
        gl.thread_barrier()
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, layout))[:, None]
        weights = gl.convert_layout(following.to(q.dtype), gl.DotOperandLayout(0, layout, 2))
    return acc, weights, row_max, row_sum


@gluon.jit
def _consume(
    half, q_start, out_start, head, count, position, end, qk_scale, q_token_stride, q_head_stride, queries, rings,
    GROUP: gl.constexpr, NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """A consumer's job: half of the tile's rows against all of its keys."""
    k_boxes, v_boxes, k_full, k_free, v_full, _, _ = rings
    dtype: gl.constexpr = queries.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_KEYS, HEAD_DIM], dtype)
    k = k_boxes._reinterpret(dtype, [_STAGES, _KEYS, HEAD_DIM], tile_layout)
    v = v_boxes._reinterpret(dtype, [_STAGES, _KEYS, HEAD_DIM], tile_layout)
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, _KEYS, 16])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, HEAD_DIM, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [gl.num_warps(), 1], [1, 0])

    m = half * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, wide))
    live = (m < count * GROUP)[:, None]
    at = (m // GROUP).to(gl.int64) * q_token_stride + (head * GROUP + m % GROUP) * q_head_stride
    q = queries.index(half)
    q.store(gl.load(q_start + at[:, None] + d[None, :], mask=live, other=0.0))
    fence_async_shared()
    gl.thread_barrier()

    rows = half * _GROUP_ROWS + gl.arange(0, _GROUP_ROWS, layout=gl.SliceLayout(1, score_layout))
    positions = position + rows // GROUP
    mbarrier.wait(k_full.index(0), 0)
    scores = gl.zeros([_GROUP_ROWS, _KEYS], gl.float32, score_layout)
    scores = warpgroup_mma(q, k.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    gl.thread_barrier()
    mbarrier.arrive(k_free.index(0), count=1)
    # Every row sees the first key, so that its maximum is a number from here on.
    row_max = gl.full([_GROUP_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    row_sum = gl.zeros([_GROUP_ROWS], gl.float32, gl.SliceLayout(1, score_layout))
    first, _, row_max, row_sum = _weights(scores, row_max, row_sum, qk_scale, 0, end, positions, True)
    weights = gl.convert_layout(first.to(dtype), gl.DotOperandLayout(0, layout, 2))
    acc = gl.zeros([_GROUP_ROWS, HEAD_DIM], gl.float32, layout)

    # Tiles whose keys even the first token sees need no mask.
    tiles = (end + _KEYS - 1) // _KEYS
    unmasked = gl.maximum((position + 1) // _KEYS, 1)
    state = (acc, weights, row_max, row_sum)
    state = _visit(q, k, v, rings, state, 1, unmasked, end, positions, qk_scale, False)
    state = _visit(q, k, v, rings, state, unmasked, tiles, end, positions, qk_scale, True)
    acc, weights, row_max, row_sum = state
    stage = (tiles - 1) % _STAGES
    mbarrier.wait(v_full.index(stage), (tiles - 1) // _STAGES & 1)
    acc = warpgroup_mma(weights, v.index(stage), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(num_outstanding=0, deps=(acc, weights))

    acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, layout))[:, None]
    result = gl.convert_layout(acc.to(dtype), wide)
    out_head = (m // GROUP).to(gl.int64) * NUM_HEADS + head * GROUP + m % GROUP
    gl.store(out_start + out_head[:, None] * HEAD_DIM + d[None, :], result, mask=live)


@gluon.jit(do_not_specialize=["table_stride", "num_slots"], do_not_specialize_on_alignment=["tables"])
def _attend_kernel(
    q, keys, values, out, items, tables, qk_scale, num_slots, q_token_stride, q_head_stride, table_stride,
    NUM_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    ITEM_FIELDS: gl.constexpr, DEPENDENT_LAUNCH: gl.constexpr,
):  # fmt: skip
    head = gl.program_id(0)
    slot = gl.program_id(1)
    dtype: gl.constexpr = keys.dtype
    BOXES: gl.constexpr = _STAGES * (HEAD_DIM // _COLUMNS) * (_KEYS // _SLOTS)
    item = items + (1 + slot) * ITEM_FIELDS
    token = gl.load(item).to(gl.int64)
    count = gl.load(item + 1)
    position = gl.load(item + 2)
    table = tables + gl.load(item + 3).to(gl.int64) * table_stride
    end = gl.load(item + 5)

    query_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_GROUP_ROWS, HEAD_DIM], dtype)
    queries = gl.allocate_shared_memory(dtype, [2, _GROUP_ROWS, HEAD_DIM], query_layout)
    k_boxes = gl.allocate_shared_memory(dtype, [BOXES, _SLOTS, _COLUMNS], keys.layout)
    v_boxes = gl.allocate_shared_memory(dtype, [BOXES, _SLOTS, _COLUMNS], values.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    cut = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    mbarrier.init(cut, count=1)
    rings = (k_boxes, v_boxes, k_full, k_free, v_full, v_free, cut)
    # Everything above was written early in the step; q and this step's keys and values by the kernel just before.
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()
    q_start = q + token * q_token_stride
    out_start = out + token * (NUM_HEADS * HEAD_DIM)
    gl.warp_specialize(
        [
            (_consume, (0, q_start, out_start, head, count, position, end, qk_scale, q_token_stride, q_head_stride,
                        queries, rings, GROUP, NUM_HEADS, HEAD_DIM)),
            (_consume, (1, q_start, out_start, head, count, position, end, qk_scale, q_token_stride, q_head_stride,
                        queries, rings, GROUP, NUM_HEADS, HEAD_DIM)),
            (_produce, (keys, values, table, head, end, num_slots, rings, BLOCK_SIZE)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def can_attend_whole(q: Tensor, keys: Tensor, values: Tensor, block_size: int) -> bool:
    """Whether :func:`attend_tiles_whole` takes tensors of these shapes, dtypes and strides."""
    num_kv_heads, head_dim = keys.shape[1:]
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and q.shape[1] // num_kv_heads <= _ROWS.value
        and block_size % _SLOTS.value == 0
        and keys.is_contiguous()
        and values.is_contiguous()
    )


def attend_tiles_whole(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    tables: Tensor,
    work: WorkList,
    block_size: int,
    *,
    qk_scale: float,
    dependent: bool = False,
) -> None:
    """Attend from the tiles of a work list, each of which is one item.

    Args:
        q, keys, values: as :func:`can_attend_whole` accepts them; see ``TritonAttention.attend``.
        out: ``[num_tokens, num_heads * head_dim]``, contiguous.
        tables: ``[rows, blocks]``, int32, unit stride in ``blocks``.
        work: ``num_slots`` items without a window, of ``128 // group`` tokens, cut by tiles of 128 keys.
        block_size: tokens per block.
        qk_scale: factor on the scores, whose softmax is to the base 2.
        dependent: launched early.
    """
    assert keys.is_contiguous()
    assert values.is_contiguous()
    num_slots, num_kv_heads, head_dim = keys.shape
    num_heads = q.shape[1]
    launch_kernel(
        _attend_kernel,
        (num_kv_heads, work.num_slots),
        q,
        _boxes(keys),
        _boxes(values),
        out,
        work.items,
        tables,
        qk_scale,
        num_slots,
        q.stride(0),
        q.stride(1),
        tables.stride(0),
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ITEM_FIELDS=ITEM_FIELDS,
        DEPENDENT_LAUNCH=dependent,
        num_warps=WHOLE_TILE.num_warps,
        **dependent_launch_options(on=dependent),
    )


def _boxes(cache: Tensor) -> TensorDescriptor:
    """How TMA reads one layer's keys or values: slots by the columns of all heads."""
    return boxes_of(cache.flatten(1), _SLOTS.value, _COLUMNS.value)
