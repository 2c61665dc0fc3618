"""top_k, top_p and min_p against their definitions and against transformers' processors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gapless.sampling.filters import filter_logits


def _kept(logits: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    filtered = filter_logits(
        torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    row = filtered[0]
    kept = (row > -torch.inf).nonzero()[:, 0].tolist()
    assert row[kept].tolist() == torch.tensor(logits)[kept].tolist(), "what stays is unchanged"
    return kept


# Probabilities 0.4, 0.3, 0.2, 0.1, in another order.
_LOGITS = torch.tensor([0.2, 0.4, 0.1, 0.3]).log().tolist()


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(0, [0, 1, 2, 3]), (-1, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3])],
)
def test_c20_top_k_keeps_k_and_is_clamped(top_k: int, kept: list[int]) -> None:
    assert _kept(_LOGITS, top_k=top_k) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [0, 1, 2, 3]),
        (0.95, [0, 1, 2, 3]),
        (0.85, [0, 1, 3]),
        (0.5, [1, 3]),
        (0.3, [1]),
        (1e-4, [1]),
        (1e-300, [1]),
    ],
)
def test_c18_top_p_keeps_the_smallest_set_and_at_least_one(top_p: float, kept: list[int]) -> None:
    assert _kept(_LOGITS, top_p=top_p) == kept


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, [0, 1, 2, 3]), (0.3, [0, 1, 3]), (0.6, [1, 3]), (1.0, [1])])
def test_min_p_is_relative_to_the_most_likely(min_p: float, kept: list[int]) -> None:
    assert _kept(_LOGITS, min_p=min_p) == kept


def test_top_p_counts_what_top_k_left() -> None:
    # Of 0.4 and 0.3, the first is 0.57.
    assert _kept(_LOGITS, top_k=2, top_p=0.56) == [1]
    assert _kept(_LOGITS, top_p=0.56) == [1, 3]


def test_ties_at_the_border_of_top_k_stay() -> None:
    assert _kept([1.0, 2.0, 1.0, 0.0], top_k=2) == [0, 1, 2]


def test_masked_tokens_stay_masked() -> None:
    assert _kept([-torch.inf, 1.0, 0.5, -torch.inf], top_k=3) == [1, 2]


def test_each_row_has_its_own_values() -> None:
    logits = torch.tensor([_LOGITS] * 3)
    filtered = filter_logits(
        logits, torch.tensor([1, 0, 0]), torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 0.3])
    )
    assert [(row > -torch.inf).nonzero()[:, 0].tolist() for row in filtered] == [[1], [1, 3], [0, 1, 3]]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0.05, 0.99), st.floats(0.01, 0.9))
def test_they_are_those_of_transformers(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)) * 3
    expected = TopKLogitsWarper(top_k)(None, logits)
    expected = TopPLogitsWarper(top_p)(None, expected)
    expected = MinPLogitsWarper(min_p)(None, expected)

    filtered = filter_logits(logits, torch.full((4,), top_k), torch.full((4,), top_p), torch.full((4,), min_p))

    assert torch.equal(filtered, expected)
