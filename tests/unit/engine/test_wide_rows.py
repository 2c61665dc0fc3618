"""Who gets a wide row, and how much of what requests bring fits into one step."""

import numpy as np
import pytest

from gapless.engine.wide_rows import KnownTokens, WideOptions, WideRows
from gapless.pipeline.wide_rows import WideBuilder, WideLimits
from gapless.sampling.bad_words import ANY_TOKEN, MAX_WORD_TOKENS, MAX_WORDS, NO_TOKEN, NUM_RECENT
from gapless.sampling_params import SamplingParams


def options(**params: object) -> WideOptions:
    made = WideOptions.of(SamplingParams(**params), [])  # type: ignore[arg-type]
    assert made is not None
    return made


def known(prompt: list[int], output: list[int]) -> KnownTokens:
    return KnownTokens(prompt=np.array(prompt, dtype=np.int32), output=output)


PENALISED = options(presence_penalty=0.5)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "top_k": 5, "logprobs": 3, "min_tokens": 2, "max_tokens": 4},
        {"logit_bias": {}},
        {"repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": 0.0},
    ],
)
def test_options_that_change_nothing_need_no_row(params: dict[str, object]) -> None:
    assert WideOptions.of(SamplingParams(**params), []) is None  # type: ignore[arg-type]


def test_biases_allowed_ids_and_short_bad_words_become_one_row() -> None:
    made = WideOptions.of(
        SamplingParams(logit_bias={1: 2.0, 5: 3.0}, allowed_token_ids=[1, 2, 3]), [[3], [1, 2], [7, 8, 9]]
    )
    assert made is not None
    assert made.bias_fill == -np.inf
    assert made.bias_ids is not None
    assert made.bias_values is not None
    assert dict(zip(made.bias_ids.tolist(), made.bias_values.tolist(), strict=True)) == {1: 2.0, 2: 0.0, 3: -np.inf}
    assert made.penalties is None
    assert made.words is not None
    table = made.words.reshape(MAX_WORDS, MAX_WORD_TOKENS)
    assert table[0].tolist() == [ANY_TOKEN] * (MAX_WORD_TOKENS - 2) + [1, 2]
    assert table[1, -3:].tolist() == [7, 8, 9]
    assert (table[2:] == NO_TOKEN).all()


def test_a_row_comes_back_and_goes_to_the_next_one() -> None:
    rows = WideRows(WideLimits(max_rows=1, max_history=10, max_biases=0, max_word_inits=0))
    builder = WideBuilder()
    assert rows.fits(PENALISED, 3, builder)
    row = rows.enter(PENALISED, known([1, 2], [3]), builder)
    assert not rows.fits(PENALISED, 1, WideBuilder()), "no row is free"
    rows.leave(row)
    assert rows.fits(PENALISED, 3, WideBuilder())
    [init] = builder.penalties
    assert (init.prompt.tolist(), init.output.tolist()) == ([1, 2], [3])
    assert (init.repetition, init.frequency, init.presence) == (1.0, 0.0, 0.5)


def test_a_step_has_room_for_so_much() -> None:
    rows = WideRows(WideLimits(max_rows=9, max_history=10, max_biases=4, max_word_inits=1))
    builder = WideBuilder()
    rows.enter(PENALISED, known([1] * 7, [2]), builder)
    assert rows.fits(PENALISED, 2, builder)
    assert not rows.fits(PENALISED, 3, builder)
    biased = options(logit_bias={1: 1.0, 2: 1.0, 3: 1.0})
    assert rows.fits(biased, 1000, builder), "it brings no history"
    rows.enter(biased, known([1], []), builder)
    assert not rows.fits(biased, 1, builder)
    worded = WideOptions.of(SamplingParams(), [[1, 2]])
    assert worded is not None
    rows.enter(worded, known(list(range(20)), [90, 91]), builder)
    assert not rows.fits(worded, 1, builder)
    assert builder.words[0].recent.tolist() == [*range(20 - NUM_RECENT + 2, 20), 90, 91]
    work = builder.build()
    assert work is not None
    assert work.has_inits


def test_a_sample_is_named_for_what_it_uses_only() -> None:
    rows = WideRows(WideLimits(max_rows=9, max_history=10, max_biases=4, max_word_inits=1))
    builder = WideBuilder()
    assert builder.build() is None
    rows.sample(PENALISED, 4, 7, builder)
    work = builder.build()
    assert work is not None
    assert (work.penalised_samples, work.penalised_rows) == ((7,), (4,))
    assert not work.biased_samples
    assert not work.worded_samples
    assert not work.has_inits
