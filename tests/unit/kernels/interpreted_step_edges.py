"""The ends of a step in Triton's interpreter against plain torch (see test_kernels_interpreted)."""

import pytest
import torch

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


def test_keep() -> None:
    tokens, top = torch.tensor([7, 2**31 - 1, 0, 5]), torch.tensor([1.0, torch.nan, torch.inf, -3.0])
    rows = torch.tensor([3, 0, 9, 4], dtype=torch.int32)
    ours, expected = torch.full((2, 10), -1), torch.full((2, 8), -1, dtype=torch.int32)
    OURS.keep(tokens, top, rows, ours[0], expected[0])
    REFERENCE.keep(tokens, top, rows, ours[1], expected[1])
    assert ours[0].equal(ours[1])
    assert expected[0].equal(expected[1])
    assert expected[0, 4:].tolist() == [1, 0, 0, 1]
