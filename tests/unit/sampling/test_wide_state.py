"""The sampler's wide tables: who is changed, by what, and that a new owner finds nothing of the last one."""

import math

import pytest
import torch
from torch import Tensor

from gapless.sampling.bad_words import ANY_TOKEN, MAX_WORD_TOKENS, MAX_WORDS, NO_TOKEN, NUM_RECENT, WordInits
from gapless.sampling.logprobs import LOGPROB_FLOOR, all_logprobs, token_logprobs
from gapless.sampling.penalties import PenaltyInits
from gapless.sampling.row_samples import RowSamples
from gapless.sampling.token_bias import BiasInits
from gapless.sampling.wide_state import WideInits, WideSamples, WideState

VOCAB = 10
CPU = torch.device("cpu")


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def which(samples: list[int], rows: list[int]) -> RowSamples:
    return RowSamples(samples=ids(*samples), rows=ids(*rows))


def penalties(row: int, values: tuple[float, float, float], prompt: list[int], output: list[int]) -> PenaltyInits:
    return PenaltyInits(
        rows=ids(row),
        values=torch.tensor([values]),
        prompt_rows=ids(*[row] * len(prompt)),
        prompt_ids=ids(*prompt),
        output_rows=ids(*[row] * len(output)),
        output_ids=ids(*output),
    )


def words(row: int, *banned: list[int], recent: list[int]) -> WordInits:
    table = torch.full((1, MAX_WORDS, MAX_WORD_TOKENS), NO_TOKEN, dtype=torch.int32)
    for place, word in enumerate(banned):
        table[0, place] = torch.tensor([ANY_TOKEN] * (MAX_WORD_TOKENS - len(word)) + word, dtype=torch.int32)
    latest = torch.tensor([[NO_TOKEN] * (NUM_RECENT - len(recent)) + recent], dtype=torch.int32)
    return WordInits(rows=ids(row), words=table, recent=latest)


@pytest.fixture
def state() -> WideState:
    return WideState(num_rows=3, vocab_size=VOCAB, device=CPU)


def test_penalties_count_prompt_and_output_apart(state: WideState) -> None:
    state.set_rows(WideInits(penalties=penalties(2, (2.0, 0.5, 0.25), [1, 1, 2], [2, 3, 3]), biases=None, words=None))
    samples = WideSamples(penalised=which([1], [2]), biased=None, worded=None)
    logits = torch.stack([torch.ones(VOCAB), torch.ones(VOCAB)])
    logits[1, 3] = -1.0
    state.apply(logits, samples)
    expected = torch.ones(VOCAB)
    # Token 1 stands in the prompt alone, 2 in both, 3 twice in the output.
    expected[[1, 2, 3]] = torch.tensor([0.5, 0.5 - 0.5 - 0.25, -2.0 - 2 * 0.5 - 0.25])
    assert torch.allclose(logits[1], expected)
    assert torch.equal(logits[0], torch.ones(VOCAB)), "the neighbour"

    state.update(samples, ids(7, 4))
    logits = torch.ones(2, VOCAB)
    state.apply(logits, samples)
    assert logits[1, 4] == pytest.approx(0.5 - 0.75)
    assert logits[1, 7] == 1, "the neighbour's token"


def test_a_new_owner_of_a_row_finds_it_empty(state: WideState) -> None:
    samples = WideSamples(penalised=which([0], [1]), biased=None, worded=None)
    state.set_rows(WideInits(penalties=penalties(1, (2.0, 1.0, 1.0), [1], [2]), biases=None, words=None))
    state.update(samples, ids(3))
    state.set_rows(WideInits(penalties=penalties(1, (2.0, 1.0, 1.0), [5], []), biases=None, words=None))
    logits = torch.ones(1, VOCAB)
    state.apply(logits, samples)
    assert torch.nonzero(logits[0] != 1).flatten().tolist() == [5]


def test_biases_and_allowed_ids(state: WideState) -> None:
    state.set_rows(
        WideInits(
            penalties=None,
            biases=BiasInits(
                rows=ids(0, 2),
                fills=torch.tensor([0.0, -math.inf]),
                entry_rows=ids(0, 2, 2),
                entry_ids=ids(4, 1, 2),
                entry_values=torch.tensor([1.5, 0.0, -2.0]),
            ),
            words=None,
        )
    )
    logits = torch.zeros(3, VOCAB)
    state.apply(logits, WideSamples(penalised=None, biased=which([2, 0], [0, 2]), worded=None))
    assert logits[2].tolist() == [0, 0, 0, 0, 1.5, 0, 0, 0, 0, 0]
    assert logits[0].tolist() == [-math.inf, 0, -2, *[-math.inf] * 7]
    assert not logits[1].any()


def test_bad_words_look_at_the_latest_tokens(state: WideState) -> None:
    longest = [9] * MAX_WORD_TOKENS
    state.set_rows(WideInits(penalties=None, biases=None, words=words(1, [3, 4], [2, 3, 5], longest, recent=[2, 3])))
    samples = WideSamples(penalised=None, biased=None, worded=which([0], [1]))

    def forbidden() -> list[int]:
        logits = torch.zeros(1, VOCAB)
        state.apply(logits, samples)
        return torch.nonzero(logits[0].isinf()).flatten().tolist()

    assert forbidden() == [4, 5]
    state.update(samples, ids(3))
    assert forbidden() == [4], "3 and 3 before"
    state.update(samples, ids(4))
    assert forbidden() == []
    for _ in range(MAX_WORD_TOKENS - 2):
        state.update(samples, ids(9))
        assert forbidden() == []
    state.update(samples, ids(9))
    assert forbidden() == [9]


def test_log_probs_of_equal_large_and_impossible_logits() -> None:
    logits = torch.tensor([[1e4, 1e4, 1e4 - 2, -torch.inf], [0.0, 0.0, 0.0, 0.0], [torch.nan, 1.0, 2.0, 3.0]])
    rated = token_logprobs(logits, ids(3, 2, 1), 2)
    assert rated.chosen[0] == LOGPROB_FLOOR
    assert rated.ranks.tolist()[:2] == [4, 1], "equal ones share the best rank"
    assert rated.chosen[1] == pytest.approx(-math.log(4))
    assert rated.top[0].tolist() == pytest.approx([-math.log(2 + math.exp(-2))] * 2, abs=1e-6)
    assert sorted(rated.top_ids[0].tolist()) == [0, 1]
    assert rated.chosen[2].isnan()
    everything = all_logprobs(logits)
    assert everything[0, 3] == LOGPROB_FLOOR
    assert float(everything[1].exp().sum()) == pytest.approx(1)
    assert token_logprobs(logits, ids(0, 0, 0), 0).top.shape == (3, 0)
