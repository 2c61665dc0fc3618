# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Work lists: which part of which context each program of an attention launch reads, decided on the device.

The idea: a *tile* is a few neighbouring query tokens of one entry with all query heads of a KV head. Its keys are
split into chunks, and each (tile, chunk) is one *work item*. The host fixes the number of item slots from counts, or
bounds on them, alone, so a launch never depends on lengths; one small kernel then counts the tiles, says how many items
they are to become, and finds the smallest chunk, in units of key tiles, for which these are enough. A long context is
thereby cut into many items and a short one left whole, whatever the mixture of lengths, and the items end nearly
together. This is the planning step of FlashInfer (arXiv 2501.01005) moved from the host to the device, where a CUDA
graph can replay it.

A work list is device state of one step, made and read on the compute stream only. All layers with the same window
share it. Items depend on lengths only, so equal steps give equal items and equal bits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.launch import launch_kernel
from gapless.layers.forward_inputs import ForwardInputs

__all__ = ["ITEM_FIELDS", "TileClass", "WorkList", "build_work_list", "work_list_reference"]

# int32 fields of an item: first token on the flat axis, number of tokens, position of the first token, row, first key,
# end of keys, first item slot of the same tile, number of items of the same tile. One record is one 32-byte sector.
ITEM_FIELDS = 8
_MIN_BLOCK = 1024  # vectors of the planning kernel: one compiled variant serves every step up to this many entries


@dataclass(frozen=True, kw_only=True, slots=True)
class TileClass:
    """The entries that one launch serves, those of ``min_query`` to ``max_query`` new tokens, and how they are cut.

    Attributes:
        min_query, max_query: in tokens.
        tile_tokens, tile_keys: of a tile.
        spare_items: the items may be so many more than the tiles.
        least_items: the items may be so many in any case.
    """

    min_query: int
    max_query: int
    tile_tokens: int
    tile_keys: int
    spare_items: int
    least_items: int

    def count_tiles(self, host_query_lens: tuple[int, ...]) -> int:
        """Number of tiles over all entries of this class."""
        size = self.tile_tokens
        return sum(-(-length // size) for length in host_query_lens if self.min_query <= length <= self.max_query)

    def most_items(self, num_tiles: int) -> int:
        """How many items so many tiles may become."""
        return max(num_tiles + self.spare_items, self.least_items)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkList:
    """Items of one launch.

    Attributes:
        items: ``[1 + num_slots, ITEM_FIELDS]``, int32: record 0 holds the number of items, the others are the items.
        arrivals: ``[num_slots * num_kv_heads]``, int32, zero between launches: items of a tile that have finished.
        num_slots: most items; the launch has this many programs for each KV head.
    """

    items: Tensor
    arrivals: Tensor
    num_slots: int


@triton.jit(
    # Counts and the offsets of packed inputs differ between steps; none of them is worth a compilation in mid-flight.
    do_not_specialize=["num_entries", "most_tiles", "spare_items", "least_items", "num_arrivals", "window"],
    do_not_specialize_on_alignment=["query_starts", "seq_lens", "rows"],
)
def _work_list_kernel(
    query_starts,
    seq_lens,
    rows,
    tile_map,
    items,
    arrivals,
    num_entries,
    most_tiles,
    spare_items,
    least_items,
    num_arrivals,
    window,
    MIN_QUERY: tl.constexpr,
    MAX_QUERY: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
):
    # One program does it all: a step has at most a few thousand entries and tiles.
    for start in range(0, num_arrivals, 1024):
        at = start + tl.arange(0, 1024)
        tl.store(arrivals + at, tl.zeros([1024], tl.int32), mask=at < num_arrivals)

    # Which entry and part of it is tile t? Later tiles of a prefill have more keys, so they come first.
    entry = tl.arange(0, BLOCK_ENTRIES)
    live = entry < num_entries
    query_len = tl.load(query_starts + entry + 1, mask=live, other=0) - tl.load(
        query_starts + entry, mask=live, other=0
    )
    chosen = live & (query_len >= MIN_QUERY) & (query_len <= MAX_QUERY)
    tiles = tl.where(chosen, (query_len + TILE_TOKENS - 1) // TILE_TOKENS, 0)
    first_tile = tl.cumsum(tiles, 0) - tiles
    for j in range(tl.max(tiles, 0)):
        at = first_tile + j
        inside = (j < tiles) & (at < most_tiles)
        tl.store(tile_map + 2 * at, entry, mask=inside)
        tl.store(tile_map + 2 * at + 1, tiles - 1 - j, mask=inside)
    tl.debug_barrier()  # the stores above are read below by other threads of this program

    num_tiles = tl.minimum(tl.sum(tiles, 0), most_tiles)
    num_slots = tl.maximum(num_tiles + spare_items, least_items)
    tile = tl.arange(0, BLOCK_TILES)
    live_tile = tile < num_tiles
    owner = tl.load(tile_map + 2 * tile, mask=live_tile, other=0)
    part = tl.load(tile_map + 2 * tile + 1, mask=live_tile, other=0)
    query_end = tl.load(query_starts + owner + 1, mask=live_tile, other=0)
    token = tl.load(query_starts + owner, mask=live_tile, other=0) + part * TILE_TOKENS
    count = tl.minimum(query_end - token, TILE_TOKENS)
    position = tl.load(seq_lens + owner, mask=live_tile, other=0) - (query_end - token)
    row = tl.load(rows + owner, mask=live_tile, other=0)
    key_end = position + count
    key_begin = tl.zeros_like(key_end)
    if HAS_WINDOW:
        key_begin = tl.maximum(position - window + 1, 0) // TILE_KEYS * TILE_KEYS
    key_tiles = tl.where(live_tile, (key_end - key_begin + TILE_KEYS - 1) // TILE_KEYS, 0)

    # The smallest chunk whose items fit: their number falls as the chunk grows, and one item a tile always fits.
    low = tl.maximum((tl.sum(key_tiles, 0) + num_slots - 1) // tl.maximum(num_slots, 1), 1)
    high = tl.maximum(tl.max(key_tiles, 0), low)
    while low < high:
        middle = (low + high) // 2
        fits = tl.sum((key_tiles + middle - 1) // middle, 0) <= num_slots
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)

    # Even chunks within a tile; rounding up may leave fewer of them.
    splits = (key_tiles + low - 1) // low
    chunk = tl.maximum((key_tiles + splits - 1) // tl.maximum(splits, 1), 1)
    splits = (key_tiles + chunk - 1) // chunk
    first_slot = tl.cumsum(splits, 0) - splits
    tl.store(items, tl.sum(splits, 0))
    chunk_keys = chunk * TILE_KEYS
    for s in range(tl.max(splits, 0)):
        inside = s < splits
        item = items + (1 + first_slot + s) * FIELDS
        begin = key_begin + s * chunk_keys
        tl.store(item, token, mask=inside)
        tl.store(item + 1, count, mask=inside)
        tl.store(item + 2, position, mask=inside)
        tl.store(item + 3, row, mask=inside)
        tl.store(item + 4, begin, mask=inside)
        tl.store(item + 5, tl.minimum(begin + chunk_keys, key_end), mask=inside)
        tl.store(item + 6, first_slot, mask=inside)
        tl.store(item + 7, splits, mask=inside)


def build_work_list(
    inputs: ForwardInputs,
    tile_class: TileClass,
    *,
    most_tiles: int,
    num_kv_heads: int,
    window: int | None,
) -> WorkList:
    """Enqueue the planning kernel on the current stream.

    Args:
        inputs: the step's inputs; ``query_starts``, ``seq_lens`` and ``rows`` are read on the device.
        tile_class: which entries, and how they are cut.
        most_tiles: how many tiles there are, or a bound on that: it decides memory and the number of slots, not items.
        num_kv_heads: sizes ``arrivals``.
        window: keys that a token sees, itself included; ``None`` is all.
    """
    num_entries, num_slots = len(inputs.rows), tile_class.most_items(most_tiles)
    assert 0 < most_tiles <= num_slots, f"{most_tiles} tiles do not fit into {num_slots} slots"
    device = inputs.seq_lens.device
    items = torch.empty((1 + num_slots, ITEM_FIELDS), dtype=torch.int32, device=device)
    arrivals = torch.empty(num_slots * num_kv_heads, dtype=torch.int32, device=device)
    tile_map = torch.empty((most_tiles, 2), dtype=torch.int32, device=device)
    launch_kernel(
        _work_list_kernel,
        (1,),
        inputs.query_starts,
        inputs.seq_lens,
        inputs.rows,
        tile_map,
        items,
        arrivals,
        num_entries,
        most_tiles,
        tile_class.spare_items,
        tile_class.least_items,
        arrivals.numel(),
        window or 0,
        MIN_QUERY=tile_class.min_query,
        MAX_QUERY=tile_class.max_query,
        TILE_TOKENS=tile_class.tile_tokens,
        TILE_KEYS=tile_class.tile_keys,
        HAS_WINDOW=window is not None,
        FIELDS=ITEM_FIELDS,
        BLOCK_ENTRIES=max(_MIN_BLOCK, triton.next_power_of_2(num_entries)),
        BLOCK_TILES=max(_MIN_BLOCK, triton.next_power_of_2(most_tiles)),
        num_warps=8,
    )
    return WorkList(items=items, arrivals=arrivals, num_slots=num_slots)


def work_list_reference(inputs: ForwardInputs, tile_class: TileClass, *, window: int | None) -> list[list[int]]:
    """The items that :func:`build_work_list` makes, as plain lists, computed on the host (it waits for the device)."""
    starts, seq_lens, rows = inputs.query_starts.tolist(), inputs.seq_lens.tolist(), inputs.rows.tolist()
    keys, size = tile_class.tile_keys, tile_class.tile_tokens
    tiles: list[tuple[int, int, int, int, int]] = []  # token, count, position, row, first key
    for entry, row in enumerate(rows):
        begin, end = starts[entry], starts[entry + 1]
        if not tile_class.min_query <= end - begin <= tile_class.max_query:
            continue
        for token in reversed(range(begin, end, size)):
            position = seq_lens[entry] - (end - token)
            first_key = 0 if window is None else max(position - window + 1, 0) // keys * keys
            tiles.append((token, min(size, end - token), position, row, first_key))
    key_tiles = [-(-(position + count - first) // keys) for _, count, position, _, first in tiles]
    most = tile_class.most_items(len(tiles))
    chunk = next(c for c in range(1, max(key_tiles, default=0) + 2) if sum(-(-k // c) for k in key_tiles) <= most)
    items: list[list[int]] = []
    for (token, count, position, row, first), length in zip(tiles, key_tiles, strict=True):
        step = -(-length // -(-length // chunk)) * keys
        begins = range(first, position + count, step)
        slot = len(items)
        for begin in begins:
            key_end = min(begin + step, position + count)
            items.append([token, count, position, row, begin, key_end, slot, len(begins)])
    return items
