"""The sizes that steps are padded to, and padding that can harm nobody."""

import numpy as np
import pytest

from gapless.layers.forward_inputs import StepBounds
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch
from gapless.pipeline.padding import (
    StepBuckets,
    decode_buckets,
    idle_decode_batch,
    idle_mixed_batch,
    mixed_buckets,
)
from unit.pipeline.batch_arrays import lists_of


def _step(*entries: tuple[int, int, int, bool]) -> ScheduledBatch:
    """Entries of (row, start, tokens, samples); a single token that samples is carried."""
    builder = BatchBuilder(0)
    for row, start, num_tokens, samples in entries:
        carries = num_tokens == 1 and samples
        entry = BatchEntry(100 + row, 0, row, start, num_tokens, samples, samples, carries, 3)
        if num_tokens == 1:
            builder.add_token(entry, 0)
        else:
            builder.add_chunk(entry, np.arange(1, 1 + num_tokens, dtype=np.int32))
    return builder.build()


def test_c15_buckets_cost_little_padding() -> None:
    assert decode_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_buckets(256)[10:] == (64, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert decode_buckets(100)[10:] == (64, 100)
    assert decode_buckets(1) == (1,)
    assert decode_buckets(33)[-2:] == (32, 33)
    buckets = decode_buckets(1000)
    for size in range(1, 1001):
        padding = min(bucket for bucket in buckets if bucket >= size) - size
        assert padding < (8 if size <= 64 else 64 if size <= 128 else 16 if size <= 256 else 32)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 63, 64, 65, 255, 256, 257, 300])
def test_buckets_rise_to_the_number_of_rows(max_rows: int) -> None:
    buckets = decode_buckets(max_rows)

    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_rows


def test_mixed_buckets_rise_and_end_where_they_are_told() -> None:
    assert mixed_buckets(15) == ()
    assert mixed_buckets(130) == (16, 32, 64, 128)
    assert mixed_buckets(512)[4:] == (160, 192, 256, 320, 384, 512)
    every = mixed_buckets(10**6)
    assert list(every) == sorted(set(every))
    assert every[-1] == 2048
    for size in range(129, 2049):
        assert min(bucket for bucket in every if bucket >= size) <= size * 4 / 3


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 9)])
def test_c15_decodes_are_padded_to_the_next_bucket(count: int, size: int) -> None:
    step = _step(*((row, 10 + row, 1, True) for row in range(count)))

    batch = StepBuckets(num_rows=20, decode=(1, 2, 4, 8), mixed=(16,)).pad(step)
    arrays = lists_of(batch)

    extra = size - count
    assert len(batch.entries) == count
    assert arrays["rows"] == arrays["token_rows"] == arrays["sample_rows"] == [*range(count), *[20] * extra]
    assert arrays["carry"] == [*range(count), *[-1] * extra]
    assert arrays["positions"] == [*range(10, 10 + count), *[0] * extra]
    assert arrays["seq_lens"] == [*range(11, 11 + count), *[1] * extra]
    assert arrays["input_ids"] == [0] * size
    assert arrays["query_lens"] == [1] * size
    assert arrays["sample_tokens"] == list(range(size))
    assert arrays["output_positions"] == [3] * count + [0] * extra
    assert batch.bounds is None


def test_c15_a_mixed_step_is_padded_with_tokens_of_no_entry_and_entries_of_no_token() -> None:
    step = _step((2, 7, 1, True), (0, 3, 2, False), (1, 0, 3, True))

    batch = StepBuckets(num_rows=5, decode=(8,), mixed=(4, 8, 16)).pad(step)

    assert batch.entries == step.entries
    assert batch.bounds == StepBounds(decodes=5, prefills=4)
    assert lists_of(batch) == {
        "input_ids": [0, 1, 2, 1, 2, 3, 0, 0],
        "positions": [7, 3, 4, 0, 1, 2, 0, 0],
        "carry": [2, -1, -1, -1, -1, -1, -1, -1],
        "token_rows": [2, 0, 0, 1, 1, 1, 5, 5],
        "query_lens": [1, 2, 3, 0, 0],
        "seq_lens": [8, 5, 3, 0, 0],
        "rows": [2, 0, 1, 5, 5],
        # Samples are as many as there are.
        "sample_tokens": [0, 5],
        "sample_rows": [2, 1],
        "output_positions": [3, 3],
        "random_samples": [],
    }


@pytest.mark.parametrize(
    ("entries", "padded"),
    [
        ([(0, 4, 1, False)], True),  # one token and no sample: the end of a prompt that asks for none
        ([(0, 0, 16, True)], True),  # as large as the bucket
        ([(0, 0, 17, True)], False),
        ([(row, 0, 2, True) for row in range(4)], True),
        ([(row, 0, 2, True) for row in range(5)], False),  # more prompts than launches have room for
    ],
)
def test_which_mixed_steps_are_padded(entries: list[tuple[int, int, int, bool]], padded: bool) -> None:
    step = _step(*entries)
    batch = StepBuckets(num_rows=8, mixed=(16,)).pad(step)

    assert (batch.bounds is not None) == padded
    assert len(batch.input_ids) == (16 if padded else len(step.input_ids))
    assert (batch is step) == (not padded)


def test_without_sizes_nothing_is_padded() -> None:
    for step in (_step((0, 4, 1, True)), _step((0, 0, 3, True))):
        assert StepBuckets(num_rows=8).pad(step) is step


def test_idle_steps_are_nothing_but_padding() -> None:
    decode, mixed = idle_decode_batch(3, 4), idle_mixed_batch(16, 4)

    assert decode.entries == mixed.entries == ()
    assert lists_of(decode)["rows"] == [4, 4, 4]
    arrays = lists_of(mixed)
    assert arrays["token_rows"] == [4] * 16
    assert arrays["query_lens"] == [0] * 4
    assert arrays["sample_rows"] == []
    assert mixed.bounds == StepBounds(decodes=4, prefills=4)
