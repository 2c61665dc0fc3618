"""Carry-over: what the model reads where the host wrote a placeholder."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.pipeline.carry_over import apply_carry_over


def _apply(ids: list[int], carry: list[int], last: list[int]) -> list[int]:
    carried = apply_carry_over(
        torch.tensor(ids, dtype=torch.int32), torch.tensor(carry, dtype=torch.int32), torch.tensor(last)
    )
    assert carried.dtype == torch.int64
    return carried.tolist()


@pytest.mark.parametrize(
    ("ids", "carry", "expected"),
    [
        pytest.param([0, 0], [0, 1], [50, 51], id="all carried"),
        pytest.param([7, 8, 9], [-1, -1, -1], [7, 8, 9], id="nothing carried stays exactly as prepared"),
        pytest.param([0, 7, 0], [2, -1, 0], [52, 7, 50], id="the request changed its row"),
        pytest.param([5, 6, 7, 0], [-1, -1, -1, 3], [5, 6, 7, 53], id="a chunk, then a decode"),
        pytest.param([0], [3], [53], id="the batch shrank"),
        pytest.param([0, 0], [1, 1], [51, 51], id="one row twice"),
    ],
)
def test_c02_carried_positions_get_their_rows_token_and_no_other(
    ids: list[int], carry: list[int], expected: list[int]
) -> None:
    assert _apply(ids, carry, [50, 51, 52, 53]) == expected


def test_a_longer_carry_vector_is_cut_to_the_input() -> None:
    assert _apply([0, 9], [1, -1, 0, 0], [50, 51]) == [51, 9]


def test_the_last_tokens_are_only_read() -> None:
    last = torch.tensor([4, 5])
    apply_carry_over(torch.zeros(2, dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32), last)
    assert last.tolist() == [4, 5]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.data())
def test_it_is_the_plain_loop(data: st.DataObject) -> None:
    last = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
    carry = data.draw(st.lists(st.integers(-1, len(last) - 1), min_size=1, max_size=20))
    ids = [0 if row >= 0 else data.draw(st.integers(0, 2**31 - 1)) for row in carry]

    assert _apply(ids, carry, last) == [last[row] if row >= 0 else ids[i] for i, row in enumerate(carry)]
