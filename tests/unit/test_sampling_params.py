"""Sampling parameters: what is refused where it is made, and what it says."""

import dataclasses
import math

import pytest

from gapless.errors import RequestError
from gapless.sampling_params import SamplingParams

_NOT_FINITE = [math.nan, math.inf, -math.inf]
_NOT_NUMBERS = ["1", None, [], True, 1j]
_NOT_INTEGERS = [0.5, 1.0, "3", True, [], math.nan]


def _refused(field: str, value: object) -> str:
    with pytest.raises(RequestError, match=f"^{field}=") as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 250
    return message


@pytest.mark.parametrize("value", [0, 0.0, 1e-300, 1e-6, 1e-5, 1e-4, 1, 2, 1e30])
def test_c18_temperatures_that_work(value: float) -> None:
    assert SamplingParams(temperature=value).greedy is (value == 0)


@pytest.mark.parametrize("value", [*_NOT_FINITE, *_NOT_NUMBERS, -1, -1e-9])
def test_c18_temperatures_that_are_refused(value: object) -> None:
    assert repr(value) in _refused("temperature", value)


@pytest.mark.parametrize("value", [1, 1.0, 0.5, 1e-4, 1e-300])
def test_c18_top_p_that_works(value: float) -> None:
    assert SamplingParams(top_p=value).top_p == value


@pytest.mark.parametrize("value", [*_NOT_FINITE, *_NOT_NUMBERS, 0, -0.1, 1.0001, 2])
def test_c18_top_p_that_is_refused(value: object) -> None:
    _refused("top_p", value)


@pytest.mark.parametrize("value", [*_NOT_FINITE, *_NOT_NUMBERS, -0.1, 1.0001])
def test_c18_min_p_that_is_refused(value: object) -> None:
    _refused("min_p", value)


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", _NOT_FINITE)
def test_c18_penalties_are_finite(field: str, value: float) -> None:
    _refused(field, value)


@pytest.mark.parametrize("value", [0, -1, 1, 50, 10**6, 10**30])
def test_c20_top_k_that_works(value: int) -> None:
    assert SamplingParams(top_k=value).top_k == value


@pytest.mark.parametrize("value", [*_NOT_INTEGERS, None, -2, -(10**30), 0.01])
def test_c20_top_k_that_is_refused(value: object) -> None:
    _refused("top_k", value)


@pytest.mark.parametrize("value", [[-1], [2**31], [2**63], [1.0], [True], ["7"], [None], [3, -1]])
def test_c25_stop_token_ids_that_are_refused(value: object) -> None:
    _refused("stop_token_ids", value)


@pytest.mark.parametrize("value", ["12", b"12", 5, {1, 2}, {1: 2}])
def test_c25_stop_token_ids_are_a_list(value: object) -> None:
    assert "list of token ids" in _refused("stop_token_ids", value)


def test_c25_stop_token_ids_have_a_limit_and_stay_as_given() -> None:
    given = list(range(64))
    params = SamplingParams(stop_token_ids=given)
    given.append(99)
    assert params.stop_token_ids == tuple(range(64))
    with pytest.raises(RequestError, match="stop_token_ids has 65 ids; at most 64"):
        SamplingParams(stop_token_ids=given)


@pytest.mark.parametrize("token", [10, 2**31 - 1])
def test_c25_the_vocabulary_is_checked_where_it_is_known(token: int) -> None:
    params = SamplingParams(stop_token_ids=[3, token])
    with pytest.raises(RequestError, match=f"stop_token_ids={token} is not in the vocabulary of 10 tokens"):
        params.check_vocabulary(10)
    params.check_vocabulary(2**31)


@pytest.mark.parametrize("value", [*_NOT_INTEGERS, -1])
@pytest.mark.parametrize("field", ["max_tokens", "min_tokens"])
def test_counts_that_are_refused(field: str, value: object) -> None:
    _refused(field, value)


@pytest.mark.parametrize("value", [0, 1, 10**30, None])
def test_max_tokens_that_works(value: int | None) -> None:
    assert SamplingParams(max_tokens=value).max_tokens == value


def test_min_tokens_is_not_above_max_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert SamplingParams(max_tokens=None, min_tokens=10**9).max_tokens is None
    with pytest.raises(RequestError, match="min_tokens=4 must not be above max_tokens=3"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 0.5, "7", True, math.nan])
def test_seeds_that_are_refused(value: object) -> None:
    _refused("seed", value)


@pytest.mark.parametrize("value", [None, 0, -1, 2**63 - 1, -(2**63)])
def test_seeds_that_work(value: int | None) -> None:
    assert SamplingParams(seed=value).seed == value


@pytest.mark.parametrize("field", ["ignore_eos", "skip_special_tokens", "detokenize"])
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_switches_are_true_or_false(field: str, value: object) -> None:
    _refused(field, value)


def test_a_long_value_is_cut_in_the_message() -> None:
    message = _refused("temperature", "x" * 10_000)
    assert "..." in message


def test_they_are_frozen_and_compare_by_value() -> None:
    params = SamplingParams(temperature=0.5, stop_token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert params == SamplingParams(temperature=0.5, stop_token_ids=(1,))
    assert dataclasses.replace(params, top_k=3).stop_token_ids == (1,)


@pytest.mark.parametrize("value", [10**400, 10**5000, -(10**5000)], ids=["400", "5000", "-5000"])
def test_c18_numbers_beyond_every_float_are_refused_by_name(value: int) -> None:
    with pytest.raises(RequestError, match="temperature="):
        SamplingParams(temperature=value)
    with pytest.raises(RequestError, match="seed="):
        SamplingParams(seed=value)
