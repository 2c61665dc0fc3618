"""Penalties in Triton's interpreter against the plain torch version; see ``test_kernels_interpreted.py``."""

import pytest
import torch

from gapless.kernels.penalties import apply_penalties_triton
from gapless.sampling.penalties import PROMPT_BIT, PenaltyInits, PenaltyTable, apply_penalties
from gapless.sampling.row_samples import RowSamples


@pytest.mark.parametrize("vocab_size", [61, 1024, 1100])
def test_penalties_are_those_of_the_plain_version(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(6, vocab_size, generator=generator) * 3
    logits[2, 5:9] = -torch.inf
    counts = torch.randint(-3, 4, (4, vocab_size), generator=generator).clamp(min=0)
    prompt = torch.randint(0, 2, (4, vocab_size), generator=generator) * PROMPT_BIT
    history = (counts + prompt).to(torch.int32)
    values = torch.tensor([[1.3, 0.5, 0.25], [1.0, -1.0, 2.0], [0.7, 0.0, 0.0], [5.0, 2.0, -2.0]])
    samples, rows = torch.tensor([4, 0, 2]), torch.tensor([3, 1, 0])
    expected = logits.clone()
    apply_penalties(expected, samples, rows, history, values)

    apply_penalties_triton(logits, samples, rows, history, values)

    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits[[1, 3, 5]], expected[[1, 3, 5]])


def test_a_table_uses_the_kernel() -> None:
    table = PenaltyTable(num_rows=3, vocab_size=50, device=torch.device("cpu"), kernel=apply_penalties_triton)
    ids = torch.tensor([1, 1, 2])
    table.set_rows(
        PenaltyInits(
            rows=torch.tensor([2]),
            values=torch.tensor([[2.0, 0.5, 0.25]]),
            prompt_rows=torch.tensor([2, 2]),
            prompt_ids=torch.tensor([7, 7]),
            output_rows=torch.full((3,), 2),
            output_ids=ids,
        )
    )
    which = RowSamples(samples=torch.tensor([1]), rows=torch.tensor([2]))
    table.update(which, torch.tensor([9, 3]))
    logits = torch.ones(2, 50)
    table.apply(logits, which)
    expected = torch.ones(50)
    expected[[7, 1, 2, 3]] = torch.tensor([0.5, 0.5 - 1.25, 0.5 - 0.75, 0.5 - 0.75])
    assert torch.allclose(logits[1], expected)
    assert torch.equal(logits[0], torch.ones(50))
