# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The attention kernel: one work item of a work list, for one KV head, read straight through the block tables.

The idea: prefill, chunked prefill and decode are the same work, a tile of query rows against a chunk of keys with an
online softmax (FlashAttention-2, arXiv 2307.08691); they differ in tile size only. A row is one query token with one of
the query heads that share the KV head, so K and V are read once for the whole group. Where a tile's keys are split over
several items (Flash-Decoding), each stores its partial result, and the last one to arrive adds them up in the order of
the keys: which program comes last varies, the sum does not.

Device state (partials, arrivals) belongs to the step's plan and is touched on the compute stream only.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["attend_kernel"]


@triton.jit
def _visit_keys(
    q,
    row_max,
    row_sum,
    acc,
    keys,
    values,
    table,
    begin,
    end,
    first_visible,
    positions,
    window,
    qk_scale,
    slot_stride,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over the keys ``[begin, end)``; without ``MASKED`` every row sees all of them, in full tiles."""
    d = tl.arange(0, PADDED_DIM)
    for start in range(begin, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        # A block's slots outside the context may hold anything, NaN too, and 0 * NaN is NaN: they are never loaded.
        if MASKED:
            stored = (key >= first_visible) & (key < end)
            block = tl.load(table + key // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
        else:
            block = tl.load(table + key // BLOCK_SIZE).to(tl.int64)
        at = (block * BLOCK_SIZE + key % BLOCK_SIZE) * slot_stride
        k_at = keys + at[None, :] + d[:, None]
        v_at = values + at[:, None] + d[None, :]
        if MASKED:
            if HEAD_DIM == PADDED_DIM:
                k = tl.load(k_at, mask=stored[None, :], other=0.0)
                v = tl.load(v_at, mask=stored[:, None], other=0.0)
            else:
                k = tl.load(k_at, mask=stored[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
                v = tl.load(v_at, mask=stored[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM == PADDED_DIM:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(d < HEAD_DIM)[:, None], other=0.0)
            v = tl.load(v_at, mask=(d < HEAD_DIM)[None, :], other=0.0)
        # "ieee" matters for fp32 operands only: TF32 would cost 13 bits of the scores.
        scores = tl.dot(q, k, input_precision="ieee") * qk_scale
        if MASKED:
            visible = stored[None, :] & (key[None, :] <= positions[:, None])
            if HAS_WINDOW:
                visible = visible & (key[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A row that has seen no key yet: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(row_max - pivot)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def _combine_items(
    out,
    partial_out,
    partial_lse,
    token,
    count,
    first_slot,
    splits,
    head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_ITEMS: tl.constexpr,
):
    """Sum a tile's partial results in the order of its keys and store the tile of ``out``."""
    ROWS: tl.constexpr = TILE_TOKENS * GROUP
    row = tl.arange(0, COMBINE_ROWS)
    d = tl.arange(0, PADDED_DIM)
    nth = tl.arange(0, COMBINE_ITEMS)
    row_max = tl.full([COMBINE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([COMBINE_ROWS], tl.float32)
    acc = tl.zeros([COMBINE_ROWS, PADDED_DIM], tl.float32)
    for start in range(0, splits, COMBINE_ITEMS):
        item = start + nth
        live = (item < splits)[:, None] & (row < count * GROUP)[None, :]
        at = ((first_slot + item[:, None]).to(tl.int64) * NUM_KV_HEADS + head) * ROWS + row[None, :]
        # ".cg": the partials were written by other multiprocessors while this one ran, so not from its L1.
        lse = tl.load(partial_lse + at, mask=live, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_out + at[:, :, None] * HEAD_DIM + d[None, None, :],
            mask=live[:, :, None] & (d < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(lse - pivot[None, :])
        decay = tl.exp2(row_max - pivot)
        row_sum = row_sum * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(part * weights[:, :, None], 0)
        row_max = new_max
    acc = acc / tl.where(row < count * GROUP, row_sum, 1.0)[:, None]
    out_head = (token + row // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + row % GROUP
    tl.store(
        out + out_head[:, None] * HEAD_DIM + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=(row < count * GROUP)[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["window", "table_stride"], do_not_specialize_on_alignment=["tables"])
def attend_kernel(
    q,
    keys,
    values,
    out,
    items,
    tables,
    partial_out,
    partial_lse,
    arrivals,
    qk_scale,
    window,
    q_token_stride,
    q_head_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    COMBINE_ROWS: tl.constexpr,
    COMBINE_ITEMS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    UNMASKED_PHASE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Program ``(KV head, item slot)``; see ``TritonAttention.attend`` for the arguments' meaning.

    Heads vary fastest, so that programs running together read whole slots.
    """
    head = tl.program_id(0)
    slot = tl.program_id(1)
    if slot >= tl.load(items):
        return
    ROWS: tl.constexpr = TILE_TOKENS * GROUP
    item = items + (1 + slot) * ITEM_FIELDS
    token = tl.load(item)
    count = tl.load(item + 1)
    position = tl.load(item + 2)
    table = tables + tl.load(item + 3).to(tl.int64) * table_stride
    begin = tl.load(item + 4)
    end = tl.load(item + 5)
    first_slot = tl.load(item + 6)
    splits = tl.load(item + 7)

    m = tl.arange(0, TILE_ROWS)
    d = tl.arange(0, PADDED_DIM)
    live = m < count * GROUP
    positions = position + m // GROUP
    # Everything above is written early in the step; q and this step's K and V by the kernel just before.
    if DEPENDENT_LAUNCH:
        gdc_wait()
        gdc_launch_dependents()  # the product that follows fits beside no program of this kernel, so it waits for room
    q_at = q + (token + m // GROUP).to(tl.int64) * q_token_stride + (head * GROUP + m % GROUP) * q_head_stride
    q_tile = tl.load(q_at[:, None] + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    keys += head * kv_head_stride
    values += head * kv_head_stride

    row_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    first_visible = begin
    if HAS_WINDOW:
        first_visible = tl.maximum(begin, position - window + 1)
    if UNMASKED_PHASE:
        # Keys that even the tile's first token sees need no mask; begin is a multiple of TILE_KEYS.
        open_end = tl.minimum(end, position + 1)
        open_end = tl.maximum(begin, open_end // TILE_KEYS * TILE_KEYS)
        row_max, row_sum, acc = _visit_keys(
            q_tile, row_max, row_sum, acc, keys, values, table, begin, open_end, first_visible, positions, window,
            qk_scale, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, HAS_WINDOW, MASKED=False,
        )  # fmt: skip
        begin = open_end
    row_max, row_sum, acc = _visit_keys(
        q_tile, row_max, row_sum, acc, keys, values, table, begin, end, first_visible, positions, window,
        qk_scale, slot_stride, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, HAS_WINDOW, MASKED=True,
    )  # fmt: skip

    seen = row_sum != 0.0  # in a split tile a row may see no key of this chunk
    acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
    if splits == 1:
        out_head = (token + m // GROUP).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head * GROUP + m % GROUP
        tl.store(
            out + out_head[:, None] * HEAD_DIM + d[None, :],
            acc.to(out.dtype.element_ty),
            mask=live[:, None] & (d < HEAD_DIM)[None, :],
        )
    else:
        at = (slot.to(tl.int64) * NUM_KV_HEADS + head) * ROWS + m
        lse = tl.where(seen, row_max + tl.log2(tl.where(seen, row_sum, 1.0)), float("-inf"))
        tl.store(partial_lse + at, lse, mask=live)
        tl.store(partial_out + at[:, None] * HEAD_DIM + d[None, :], acc, mask=live[:, None] & (d < HEAD_DIM)[None, :])
        # All threads' stores come before the count, and the count (acquire, release) before the last one's loads.
        tl.debug_barrier()
        counter = arrivals + first_slot * NUM_KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
            _combine_items(
                out, partial_out, partial_lse, token, count, first_slot, splits, head,
                NUM_KV_HEADS, GROUP, HEAD_DIM, PADDED_DIM, TILE_TOKENS, COMBINE_ROWS, COMBINE_ITEMS,
            )  # fmt: skip
            tl.store(counter, 0)  # ready for the next layer
