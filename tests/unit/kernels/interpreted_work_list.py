"""The work list kernel in Triton's interpreter against its plain Python reference (see test_kernels_interpreted)."""

from dataclasses import replace

import pytest

from gapless.kernels.work_list import TileClass, build_work_list, work_list_reference
from gapless.layers.forward_inputs import StepBounds
from unit.kernels.paged_batches import Entry, Layout, make_batch, random_entries, with_bounds

LAYOUT = Layout(num_heads=1, num_kv_heads=1, head_dim=16, block_size=16)
DECODE = TileClass(min_query=1, max_query=1, tile_tokens=1, tile_keys=16, spare_items=7, least_items=0)
PREFILL = TileClass(min_query=2, max_query=2**31 - 1, tile_tokens=6, tile_keys=16, spare_items=0, least_items=9)


@pytest.mark.parametrize("tile_class", [DECODE, PREFILL])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("spare", "least"), [(0, 0), (1, 0), (9, 4), (0, 30)])
def test_items_equal_the_reference(tile_class: TileClass, window: int | None, spare: int, least: int) -> None:
    made = 0
    tile_class = replace(tile_class, spare_items=spare, least_items=least)
    for seed in range(6):
        batch = make_batch(random_entries("mixed", seed, most=400), LAYOUT, seed=seed, padding=seed % 2)
        num_tiles = tile_class.count_tiles(batch.inputs.host_query_lens)
        if not num_tiles:
            continue
        num_slots = max(num_tiles + spare, least)
        work = build_work_list(batch.inputs, tile_class, most_tiles=num_tiles, num_kv_heads=3, window=window)
        expected = work_list_reference(batch.inputs, tile_class, window=window)
        assert work.items[0, 0].item() == len(expected) <= num_slots
        assert work.items[1 : 1 + len(expected)].tolist() == expected
        assert work.arrivals.tolist() == [0] * (num_slots * 3)
        made += 1
    assert made >= 3


@pytest.mark.parametrize("window", [None, 100])
def test_chunks_cover_each_tile_once_and_a_long_context_is_split(window: int | None) -> None:
    entries = [Entry(query_len=1, seq_len=n) for n in (4000, 30, 500, 1, 16)]
    batch = make_batch(entries, LAYOUT, seed=0)
    decode = replace(DECODE, spare_items=15)
    work = build_work_list(batch.inputs, decode, most_tiles=5, num_kv_heads=1, window=window)
    items = work.items[1 : 1 + work.items[0, 0].item()].tolist()
    for token, entry in enumerate(entries):
        chunks = [item for item in items if item[0] == token]
        ends = [item[5] for item in chunks]
        assert [item[4] for item in chunks[1:]] == ends[:-1]
        assert ends[-1] == entry.seq_len
        first_needed = 0 if window is None else max(0, entry.seq_len - window)
        assert first_needed - DECODE.tile_keys < chunks[0][4] <= first_needed
        assert {item[7] for item in chunks} == {len(chunks)}
    longest = max(item[5] - item[4] for item in items)
    if window is None:
        # 4547 keys over 20 slots are 227 each; whole tiles and whole entries cost some.
        assert longest <= 320


def test_more_entries_than_one_vector_block() -> None:
    entries = [Entry(query_len=1 + n % 3, seq_len=3 + n % 50) for n in range(1100)]
    batch = make_batch(entries, LAYOUT, seed=1)
    for tile_class in (DECODE, PREFILL):
        num_tiles = tile_class.count_tiles(batch.inputs.host_query_lens)
        work = build_work_list(batch.inputs, tile_class, most_tiles=num_tiles, num_kv_heads=1, window=None)
        expected = work_list_reference(batch.inputs, tile_class, window=None)
        assert work.items[1 : 1 + work.items[0, 0].item()].tolist() == expected


@pytest.mark.parametrize("tile_class", [DECODE, PREFILL])
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_bounds_change_memory_and_no_item(tile_class: TileClass, kind: str) -> None:
    for seed in range(3):
        batch = make_batch(random_entries(kind, seed, most=400), LAYOUT, seed=seed)
        num_tokens = len(batch.inputs.positions)
        bounds = StepBounds(decodes=6, prefills=6)
        padded = with_bounds(batch, num_tokens=num_tokens + seed, num_entries=6 + seed, bounds=bounds)
        work = build_work_list(padded.inputs, tile_class, most_tiles=500, num_kv_heads=2, window=None)
        expected = work_list_reference(batch.inputs, tile_class, window=None)
        assert work.items[0, 0].item() == len(expected)
        assert work.items[1 : 1 + len(expected)].tolist() == expected
        assert work.num_slots == max(500 + tile_class.spare_items, tile_class.least_items)
        assert not work.arrivals.any()
