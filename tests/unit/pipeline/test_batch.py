"""The batch builder: flat arrays from entries, and padding that can harm nobody."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.pipeline.batch import BatchBuilder, BatchEntry, MaskedToken, RowInit, TableChange
from unit.pipeline.batch_arrays import ARRAYS, lists_of


def _entry(
    row: int,
    start: int,
    num_tokens: int = 1,
    *,
    samples: bool = True,
    carries: bool = False,
    output_position: int = 0,
) -> BatchEntry:
    return BatchEntry(100 + row, 0, row, start, num_tokens, samples, samples, carries, output_position)


def _ids(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_a_step_of_decodes() -> None:
    builder = BatchBuilder(7)
    builder.add_token(_entry(2, 9, carries=True, output_position=4), 0)
    builder.add_token(_entry(0, 5, output_position=1), 31)

    batch = builder.build()

    assert (batch.step, [entry.row for entry in batch.entries]) == (7, [2, 0])
    assert lists_of(batch) == {
        "input_ids": [0, 31],
        "positions": [9, 5],
        "carry": [2, -1],
        "token_rows": [2, 0],
        "query_lens": [1, 1],
        "seq_lens": [10, 6],
        "rows": [2, 0],
        "sample_tokens": [0, 1],
        "sample_rows": [2, 0],
        "output_positions": [4, 1],
        "random_samples": [],
    }


def test_c02_only_the_last_token_of_an_entry_that_carries_is_carried() -> None:
    builder = BatchBuilder(0)
    builder.add_token(_entry(3, 8, carries=True), 0)
    builder.add_chunk(_entry(1, 4, 3, samples=False), _ids(11, 12, 13))
    builder.add_chunk(_entry(0, 0, 2), _ids(21, 22))
    builder.add_token(_entry(2, 6, carries=True, output_position=2), 0)
    builder.random_samples.append(1)

    assert lists_of(builder.build()) == {
        "input_ids": [0, 11, 12, 13, 21, 22, 0],
        "positions": [8, 4, 5, 6, 0, 1, 6],
        "carry": [3, -1, -1, -1, -1, -1, 2],
        "token_rows": [3, 1, 1, 1, 0, 0, 2],
        "query_lens": [1, 3, 2, 1],
        "seq_lens": [9, 7, 2, 7],
        "rows": [3, 1, 0, 2],
        "sample_tokens": [0, 5, 6],
        "sample_rows": [3, 0, 2],
        "output_positions": [0, 0, 2],
        "random_samples": [1],
    }


def test_a_step_of_one_token_chunks_may_sample_nothing() -> None:
    builder = BatchBuilder(0)
    builder.add_token(_entry(0, 3, samples=False), 8)

    arrays = lists_of(builder.build())

    assert arrays["sample_tokens"] == arrays["sample_rows"] == arrays["output_positions"] == []
    assert arrays["rows"] == [0]


def test_the_variable_parts_are_kept() -> None:
    builder = BatchBuilder(0)
    builder.add_token(_entry(1, 0), 5)
    builder.table_changes.append(TableChange(1, 0, 6))
    builder.masked_tokens.append(MaskedToken(0, 2))
    init = RowInit(row=1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=-4)
    builder.row_inits.append(init)
    builder.needs_filter = True

    batch = builder.build()

    assert batch.table_changes == (TableChange(1, 0, 6),)
    assert batch.masked_tokens == (MaskedToken(0, 2),)
    assert batch.row_inits == (init,)
    assert batch.needs_filter


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30), st.booleans(), st.booleans()), min_size=1, max_size=8))
def test_the_arrays_are_those_of_the_plain_loop(entries: list[tuple[int, int, bool, bool]]) -> None:
    builder = BatchBuilder(0)
    expected: dict[str, list[int]] = {name: [] for name in ARRAYS}
    for row, (num_tokens, start, samples, carries) in enumerate(entries):
        entry = _entry(row, start, num_tokens, samples=samples, carries=samples and carries, output_position=row)
        ids = [1000 * row + i for i in range(num_tokens)]
        if num_tokens == 1:
            builder.add_token(entry, ids[0])
        else:
            builder.add_chunk(entry, _ids(*ids))
        expected["input_ids"] += ids
        expected["positions"] += range(start, start + num_tokens)
        expected["carry"] += [-1] * (num_tokens - 1) + [row if samples and carries else -1]
        expected["token_rows"] += [row] * num_tokens
        expected["query_lens"].append(num_tokens)
        expected["seq_lens"].append(start + num_tokens)
        expected["rows"].append(row)
        if samples:
            expected["sample_tokens"].append(len(expected["input_ids"]) - 1)
            expected["sample_rows"].append(row)
            expected["output_positions"].append(row)

    assert lists_of(builder.build()) == expected
    assert builder.num_samples == len(expected["sample_rows"])
