"""``logit_bias``, ``allowed_token_ids`` and ``bad_words`` through ``LLM``: effect, validation, company."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.served_models import CPU, ROW_L, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import LLM, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1)
LONG = replace(ONE, max_tokens=8)
X, Y, Z = b"xyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loops = rows(S={"S": 5.0, "T": 4.0, "U": 3.0}, T={"S": 5.0}, U={"S": 5.0})
    return table_checkpoint(tmp_path_factory.mktemp("table"), chain(*"abcde", BYTE_EOS), rows(L=ROW_L), loops)


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda depth: f"depth{depth}")
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(folder, **CPU, depth=request.param) as made:
        yield made


def texts(llm: LLM, prompts: Any, params: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def test_c25_a_bias_changes_the_choice(llm: LLM) -> None:
    assert texts(llm, "L", replace(ONE, logit_bias={X: -100})) == ["y"]
    assert texts(llm, "L", replace(ONE, logit_bias={Z: 100})) == ["z"]
    assert texts(llm, "L", replace(ONE, logit_bias={Z: 1.5, X: 0.1})) == ["x"]
    assert texts(llm, ["L"] * 3, [ONE, replace(ONE, logit_bias={X: -100}), ONE]) == ["x", "y", "x"]


@pytest.mark.parametrize("bad", [-1, 320, 2**63, 1.5, True, "7", "x", None])
def test_c25_ids_outside_the_vocabulary_are_refused(llm: LLM, bad: Any) -> None:
    shown = str(bad)
    for name, value in (("logit_bias", {bad: 1.0}), ("allowed_token_ids", [X, bad]), ("bad_words", [[X, bad]])):
        with pytest.raises(ValueError, match=rf"^{name}=.*{shown[:19]}"):
            llm.generate("a", SamplingParams(temperature=0, max_tokens=4, **{name: value}))
    assert texts(llm, ["a", "L"], [LONG, ONE]) == ["bcde", "x"]


@pytest.mark.parametrize("bias", [100.5, -101, float("nan"), float("inf"), "1", None, True])
def test_c25_biases_have_their_range(bias: Any) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias\[120\]="):
        SamplingParams(logit_bias={X: bias})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", [1, 2]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", "xy"),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("bad_words", [[]]),
        ("bad_words", [7]),
    ],
)
def test_c25_other_shapes_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        SamplingParams(**{name: value})


def test_only_allowed_ids_come(llm: LLM) -> None:
    assert texts(llm, "L", replace(ONE, allowed_token_ids=[Y, Z])) == ["y"]
    assert texts(llm, "L", replace(ONE, allowed_token_ids=[Z, Y], logit_bias={Z: 2.0, X: 100})) == ["z"]
    params = [SamplingParams(max_tokens=1, seed=seed, allowed_token_ids=[Y, Z]) for seed in range(600)]
    counts = Counter(texts(llm, ["L"] * 600, params))
    assert set(counts) == {"y", "z"}
    # e to 1: 0.7311; 4 deviations of 600 draws are 0.072.
    assert abs(counts["y"] / 600 - 0.7311) < 0.073
    assert texts(llm, "L", replace(ONE, allowed_token_ids=range(320))) == ["x"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_bad_words_at_every_depth(folder: Path, depth: int) -> None:
    with LLM(folder, **CPU, depth=depth) as llm:
        assert texts(llm, "S", LONG) == ["SSSSSSSS"]
        # The prompt's S counts: after S and S there is no third one, after T it starts anew.
        assert texts(llm, "S", replace(LONG, bad_words=["SSS"])) == ["STSSTSST"]
        assert texts(llm, "S", replace(LONG, bad_words=["SSS", "SST"])) == ["SUSSUSSU"]
        assert texts(llm, "S", replace(LONG, bad_words=[[ord("S"), ord("S")]])) == ["TSTSTSTS"]
        several = [LONG, replace(LONG, bad_words=["SS"]), LONG, replace(LONG, bad_words=["SSS"])]
        assert texts(llm, ["S"] * 4, several) == ["SSSSSSSS", "TSTSTSTS", "SSSSSSSS", "STSSTSST"]


def test_a_bad_word_of_one_token_never_comes(llm: LLM) -> None:
    assert texts(llm, "L", replace(ONE, bad_words=["x"])) == ["y"]
    assert texts(llm, "L", replace(ONE, bad_words=["x", [Y]])) == ["z"]
    params = [SamplingParams(max_tokens=1, seed=seed, bad_words=["x"]) for seed in range(100)]
    assert set(texts(llm, ["L"] * 100, params)) == {"y", "z"}


def test_bad_words_have_their_limits(llm: LLM) -> None:
    with pytest.raises(ValueError, match="a word of 17 tokens; at most 16"):
        llm.generate("S", replace(LONG, bad_words=["S" * 17]))
    with pytest.raises(ValueError, match="129 words of several tokens; at most 128"):
        llm.generate("S", replace(LONG, bad_words=[[i, 1] for i in range(129)]))
    many = [[i, 1] for i in range(127)] + [list(b"S" * 3)]
    assert texts(llm, "S", replace(LONG, bad_words=many)) == ["STSSTSST"]
    assert texts(llm, "S" * 16, replace(LONG, bad_words=["S" * 16])) == ["T" + "S" * 7]


def test_options_that_leave_nothing_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="forbids every id of allowed_token_ids"):
        llm.generate("L", replace(ONE, allowed_token_ids=[X], bad_words=["x"]))
    with pytest.raises(ValueError, match="min_tokens=1 forbids them"):
        llm.generate("L", replace(ONE, allowed_token_ids=[BYTE_EOS], min_tokens=1))


def test_every_id_may_be_named_at_once(llm: LLM) -> None:
    """More entries than a step has room for, so requests enter one after the other."""
    everything = {token: -100.0 if token == X else 0.0 for token in range(320)}
    assert texts(llm, ["L"] * 40, replace(ONE, logit_bias=everything)) == ["y"] * 40
