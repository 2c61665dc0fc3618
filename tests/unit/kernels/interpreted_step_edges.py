"""The ends of a step in Triton's interpreter against plain torch (see test_kernels_interpreted)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import ReduceOps

from gapless.kernels.step_edges import TritonEdges, largest_logits_triton
from gapless.pipeline.step_edges import TorchEdges
from gapless.sampling.sampler import largest_logits

OURS, REFERENCE = TritonEdges(), TorchEdges()


@pytest.mark.parametrize("num_tokens", [1, 5, 300])
@pytest.mark.parametrize("block_size", [1, 16])
def test_prepare(num_tokens: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)

    def numbers(high: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, (num_tokens,), generator=generator, dtype=torch.int32)

    carry = numbers(9, -1)
    inputs = (numbers(300) * (carry < 0), carry, numbers(8 * block_size), numbers(9))
    last_tokens = torch.arange(9) * 7
    tables = torch.randint(0, 1000, (9, 8), generator=generator, dtype=torch.int32)
    result = OURS.prepare(*inputs, last_tokens, tables, block_size)
    expected = REFERENCE.prepare(*inputs, last_tokens, tables, block_size)
    for name in ("input_ids", "positions", "slot_mapping"):
        assert getattr(result, name).equal(getattr(expected, name)), name


@pytest.mark.parametrize("vocab_size", [1, 300, 8192, 20000])
def test_largest(vocab_size: int) -> None:
    logits = torch.randn((6, vocab_size), generator=torch.Generator().manual_seed(1))
    logits[1] = 3.0  # all equal: the first wins, in every part and among parts
    logits[2, vocab_size // 2] = torch.nan
    logits[3] = -torch.inf
    logits[4, -1] = torch.inf
    top, tokens = largest_logits_triton(logits)
    expected_top, expected_tokens = largest_logits(logits)
    torch.testing.assert_close(top, expected_top, rtol=0, atol=0, equal_nan=True)
    healthy = expected_top.isfinite()
    assert healthy.tolist() == [True, True, False, False, False, True]
    assert tokens[healthy].equal(expected_tokens[healthy])
    assert ((tokens >= 0) & (tokens < vocab_size)).all()  # a bad row's token means nothing, but is a token


@pytest.mark.parametrize("vocab_size", [5, 300, 8200])
def test_a_row_of_nan_gives_a_token(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device compares in pairs, where the interpreter asks NumPy, which knows NaN; so it is made to do the same."""

    def in_pairs(self: ReduceOps, pair: Sequence[tl.tensor]) -> tuple[tl.tensor, tl.tensor]:
        values, places = (each.handle.data for each in pair)
        while len(values) > 1:
            (left, right), (first, second) = np.split(values, 2), np.split(places, 2)
            wins = (left > right) | ((left == right) & (first < second))
            values, places = np.where(wins, left, right), np.where(wins, first, second)
        return self.to_tensor(values[0], pair[0].dtype), self.to_tensor(places[0], pair[1].dtype)

    ordinary = ReduceOps.apply_impl

    def apply(self: ReduceOps, given: Any) -> Any:
        return in_pairs(self, given) if len(given) == 2 else ordinary(self, given)

    monkeypatch.setattr(ReduceOps, "apply_impl", apply)
    logits = torch.randn((6, vocab_size), generator=torch.Generator().manual_seed(2))
    healthy = largest_logits(logits[5:])
    logits[0] = torch.nan
    logits[1, -1] = torch.nan
    logits[2, 0] = torch.nan
    logits[3, vocab_size // 2 :] = torch.nan
    logits[4] = torch.tensor([torch.nan, -torch.inf]).repeat(vocab_size)[:vocab_size]
    top, tokens = largest_logits_triton(logits)
    assert top[:5].isnan().all()
    assert ((tokens >= 0) & (tokens < vocab_size)).all()
    assert (top[5:].equal(healthy[0]), tokens[5:].equal(healthy[1])) == (True, True)


def test_keep() -> None:
    tokens, top = torch.tensor([7, 2**31 - 1, 0, 5]), torch.tensor([1.0, torch.nan, torch.inf, -3.0])
    rows = torch.tensor([3, 0, 9, 4], dtype=torch.int32)
    ours, expected = torch.full((2, 10), -1), torch.full((2, 8), -1, dtype=torch.int32)
    OURS.keep(tokens, top, rows, ours[0], expected[0])
    REFERENCE.keep(tokens, top, rows, ours[1], expected[1])
    assert ours[0].equal(ours[1])
    assert expected[0].equal(expected[1])
    assert expected[0, 4:].tolist() == [1, 0, 0, 1]
