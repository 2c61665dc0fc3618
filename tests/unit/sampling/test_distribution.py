"""What filters keep and how often each token is drawn, against transformers' processors: chi-square, fixed seeds."""

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gapless.sampling.drawing import draw_tokens
from gapless.sampling.filters import filter_logits
from gapless.sampling.random_numbers import uniform

VOCAB = 200
NUM_DRAWS = 20_000
# (temperature, top_k, top_p, min_p)
OPTIONS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.7, 0, 1.0, 0.0),
    (1.0, 12, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.8, 30, 0.9, 0.0),
    (1.3, 50, 0.95, 0.02),
    (0.7, 0, 0.5, 0.3),
    (1.0, 1, 1.0, 0.0),
]


def processors(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """In the order in which ``generate`` applies them."""
    made = LogitsProcessorList()
    if temperature != 1:
        made.append(TemperatureLogitsWarper(temperature))
    if top_k:
        made.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        made.append(TopPLogitsWarper(top_p))
    if min_p:
        made.append(MinPLogitsWarper(min_p))
    return made


def expected(logits: Tensor, option: tuple[float, int, float, float]) -> Tensor:
    ids = torch.zeros((1, 1), dtype=torch.int64)
    return processors(*option)(ids, logits[None].clone())[0].softmax(-1)


@pytest.fixture(scope="module")
def logits() -> Tensor:
    return torch.randn(len(OPTIONS), VOCAB, generator=torch.Generator().manual_seed(11)) * 2


@pytest.mark.parametrize("index", range(len(OPTIONS)))
def test_the_filters_keep_what_transformers_keeps(logits: Tensor, index: int) -> None:
    temperature, top_k, top_p, min_p = OPTIONS[index]
    ours = filter_logits(
        logits[index : index + 1] / temperature,
        torch.tensor([top_k], dtype=torch.int32),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )[0].softmax(-1)
    torch.testing.assert_close(ours, expected(logits[index], OPTIONS[index]), rtol=1e-5, atol=1e-7)


def test_draws_of_a_mixed_batch_have_the_distributions_of_transformers(logits: Tensor) -> None:
    """Every row has options of its own, and every draw is one of the whole batch."""
    rows = len(OPTIONS)
    samples = torch.arange(rows).repeat(NUM_DRAWS)
    columns = [torch.tensor(column).repeat(NUM_DRAWS) for column in zip(*OPTIONS, strict=True)]
    seeds = torch.arange(rows * NUM_DRAWS, dtype=torch.int64) // rows
    numbers = uniform(seeds, torch.arange(rows).repeat(NUM_DRAWS))
    counts = torch.zeros(rows, VOCAB)
    for part in torch.arange(rows * NUM_DRAWS).split(20_000):
        drawn = draw_tokens(
            logits,
            samples[part],
            logits.amax(dim=-1),
            columns[0][part],
            columns[1][part].to(torch.int32),
            columns[2][part],
            columns[3][part],
            numbers[part],
            needs_filter=True,
        )
        counts.view(-1).index_add_(0, samples[part] * VOCAB + drawn, torch.ones(len(part)))
    for index, option in enumerate(OPTIONS):
        assert_chi_square(counts[index], expected(logits[index], option))


def assert_chi_square(counts: Tensor, probabilities: Tensor) -> None:
    """Rare tokens are one class together. The bound is that of 5 standard deviations; seeds are fixed, so no flake."""
    total = float(counts.sum())
    assert not counts[probabilities == 0].any(), "a token was drawn that the filters drop"
    frequent = probabilities * total >= 10
    observed, wanted = counts[frequent], probabilities[frequent] * total
    rest = float(probabilities[~frequent].sum()) * total
    if rest >= 10:
        observed = torch.cat((observed, counts[~frequent].sum()[None]))
        wanted = torch.cat((wanted, torch.tensor([rest])))
    freedom = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic <= freedom + 5 * (2 * max(freedom, 1)) ** 0.5, (statistic, freedom)
