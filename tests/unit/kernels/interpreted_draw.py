"""Drawing in Triton's interpreter against the plain version that sorts; see ``test_kernels_interpreted.py``."""

import pytest
import torch
from torch import Tensor

import gapless.kernels.draw as kernel
from gapless.sampling.drawing import draw_tokens


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, and rows with more candidates than are copied out, in a vocabulary the interpreter can do."""
    monkeypatch.setattr(kernel, "_BLOCK", 64)
    monkeypatch.setattr(kernel, "_MAX_CANDIDATES", 128)


def compare(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, per_row: int = 4) -> None:
    samples = torch.arange(len(logits)).repeat(per_row)
    count = len(samples)
    numbers = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if float(logits.amax() - logits.clamp(min=-1e3).amin()) < 80 * temperature:
        # Elsewhere these two fall on weights that are no normal numbers, which either version may round to zero.
        numbers[0], numbers[1] = 0.0, 1 - 2.0**-53
    arguments = (
        logits,
        samples,
        logits.amax(dim=-1),
        torch.full((count,), temperature),
        torch.full((count,), top_k, dtype=torch.int32),
        torch.full((count,), top_p),
        torch.full((count,), min_p),
        numbers,
    )
    expected = draw_tokens(*arguments, needs_filter=True)
    assert kernel.draw_tokens_triton(*arguments, needs_filter=True).equal(expected)


FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (40, 1.0, 0.0),
    (200, 1.0, 0.0),
    (10**6, 0.95, 0.0),
    (0, 0.9, 0.0),
    (0, 0.3, 0.0),
    (0, 1.0, 0.05),
    (40, 0.9, 0.0),
    (200, 0.95, 0.01),
    (0, 0.99, 0.02),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
@pytest.mark.parametrize(("spread", "temperature"), [(4.0, 1.0), (0.1, 1.0), (3.0, 1e-5)])
def test_draws_are_those_of_the_plain_version(
    top_k: int, top_p: float, min_p: float, spread: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(int(spread * 10) + top_k)
    compare(torch.randn(2, 300, generator=generator) * spread + 20, temperature, top_k, top_p, min_p)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 0.9, 0.0), (5, 1.0, 0.0), (5, 0.7, 0.0), (0, 0.37, 0.0)])
def test_ties_and_masked_tokens(top_k: int, top_p: float, min_p: float) -> None:
    """Coarse logits have many equal ones, as those of a bf16 head; a whole row may be equal too."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(4, 300, generator=generator) * 2).round() / 2
    logits[1, ::3] = -torch.inf
    logits[2] = 1.0
    logits[3, 7:] = -torch.inf
    compare(logits, 1.0, top_k, top_p, min_p)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_that_are_not_numbers_end() -> None:
    logits = torch.zeros(3, 100)
    logits[0], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    count = 3
    drawn = kernel.draw_tokens_triton(
        logits,
        torch.arange(3),
        logits.amax(dim=-1),
        torch.ones(count),
        torch.full((count,), 3, dtype=torch.int32),
        torch.full((count,), 0.9),
        torch.zeros(count),
        torch.full((count,), 0.5, dtype=torch.float64),
        needs_filter=True,
    )
    assert bool(((drawn >= 0) & (drawn < 100)).all())
