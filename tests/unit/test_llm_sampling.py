"""``LLM``: how tokens are chosen and when a request ends, on models whose logits are a table."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.served_models import CPU, GREEDY, ROW_L, chain, hist_checkpoint, random_prompts, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, BYTE_IM_END
from gapless import LLM, SamplingParams
from gapless.errors import PromptTooLongError

FLAT = {chr(token): 1.0 for token in range(0x20, 0x7F)}
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = (chain(*"abcde", BYTE_EOS), rows(S={"S": 5.0}, L=ROW_L), rows(**dict.fromkeys("FGHIJK", FLAT)))
    return table_checkpoint(tmp_path_factory.mktemp("table"), *parts, nan_tokens=[ord("N")])


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda depth: f"depth{depth}")
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(folder, **CPU, depth=request.param) as made:
        yield made


def texts(llm: LLM, prompts: Any, params: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c07_no_step_past_the_limit_and_the_right_reason(folder: Path, depth: int) -> None:
    with LLM(folder, **CPU, depth=depth, block_size=1) as llm:
        for limit in (1, 2, 17):
            before = llm.counters().steps
            [output] = llm.generate("S", SamplingParams(temperature=0, max_tokens=limit))
            assert output.outputs[0].token_ids == [ord("S")] * limit
            assert output.outputs[0].finish_reason == "length"
            assert llm.counters().steps - before == limit
        before = llm.counters().steps
        [output] = llm.generate("a", GREEDY)
        assert output.outputs[0].token_ids == [*b"bcde", BYTE_EOS]
        assert output.outputs[0].finish_reason == "stop"
        assert 5 <= llm.counters().steps - before <= 5 + depth - 1
        [last] = llm.generate("a", replace(GREEDY, max_tokens=5))
        assert last.outputs[0].finish_reason == "stop", "EOS on the very last token"
        # What ran past the end is nowhere to be found: the cache knows the prompt and "bcde" at most.
        [again] = llm.generate({"prompt_token_ids": [*b"abcde", BYTE_EOS, 0, 0]}, ONE)
        assert 1 <= again.num_cached_tokens <= 5


def test_c09_what_can_never_fit_is_refused_and_the_rest_runs(tmp_path: Path) -> None:
    folder, _ = hist_checkpoint(tmp_path)
    with LLM(folder, device="cpu", num_blocks=8, block_size=16) as llm:
        assert llm.max_model_len == 128
        [long, *short] = random_prompts([200, 5, 5, 5, 5, 5])
        with pytest.raises(PromptTooLongError, match=r"200 tokens.*128"):
            llm.generate([long], GREEDY)
        assert [len(o.outputs[0].token_ids) for o in llm.generate(short, GREEDY)] == [64] * 5
        [grows] = llm.generate(random_prompts([100]), SamplingParams(temperature=0, max_tokens=100))
        assert len(grows.outputs[0].token_ids) == 29, "128 positions; the last token is never fed back"
        assert grows.outputs[0].finish_reason == "length"
        [whole] = llm.generate(random_prompts([128]), ONE)
        assert whole.outputs[0].finish_reason == "length"
        with pytest.raises(PromptTooLongError):
            llm.generate(random_prompts([129]), ONE)
        assert llm.counters().used_blocks == 0


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_c14_non_finite_logits_fail_one_request_only(folder: Path, temperature: float) -> None:
    with LLM(folder, device="cpu", num_blocks=12, block_size=4) as llm:
        params = SamplingParams(temperature=temperature, max_tokens=8)
        clean, faulty, other = llm.generate(["abcda", "abcdN", "xyzb"], params)
        assert clean.outputs[0].text == "bcde"
        assert other.outputs[0].text == "cde"
        assert faulty.outputs[0].finish_reason == "error"
        assert faulty.outputs[0].error is not None
        assert "not finite" in faulty.outputs[0].error
        assert faulty.outputs[0].token_ids == []
        assert faulty.finished
        assert llm.counters().used_blocks == 0
        # Every block is used again, those with NaN in them as well, and none of them was remembered.
        for _ in range(3):
            outputs = llm.generate([letter * 11 + "a" for letter in "PQRT"], params)
            assert [output.outputs[0].text for output in outputs] == ["bcde"] * 4
        [again] = llm.generate("abcdN", params)
        assert again.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c18_tiny_temperatures_are_greedy(folder: Path, dtype: Any, depth: int) -> None:
    with LLM(folder, **CPU, depth=depth, dtype=dtype) as llm:
        for temperature in (0, 1e-6, 1e-5, 1e-4):
            params = SamplingParams(temperature=temperature, max_tokens=1)
            assert set(texts(llm, ["L"] * 50, params)) == {"x"}
        assert set(texts(llm, ["L"] * 50, SamplingParams(top_p=1e-4, max_tokens=1))) == {"x"}


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "1", None, True])
def test_c18_impossible_values_are_refused(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        llm.generate("L", SamplingParams(**{name: value}))
    assert texts(llm, "a", GREEDY) == ["bcde"]


@pytest.mark.parametrize("top_p", [0, 1.1])
def test_c18_top_p_has_its_range(top_p: float) -> None:
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        SamplingParams(top_p=top_p)


def test_c20_top_k(llm: LLM) -> None:
    wide = SamplingParams(max_tokens=1, top_k=10**6)
    for off in (0, -1, 10**6):
        params = [replace(wide, top_k=off, seed=seed) for seed in range(200)]
        assert set(texts(llm, ["L"] * 200, params)) == {"x", "y", "z"}
    assert set(texts(llm, ["L"] * 50, replace(wide, top_k=1))) == {"x"}
    assert set(texts(llm, ["L"] * 2000, replace(wide, top_k=2))) == {"x", "y"}
    for bad in (-2, 0.5, 0.01, True, "1"):
        with pytest.raises(ValueError, match=r"^top_k="):
            SamplingParams(top_k=bad)  # type: ignore[arg-type]
    mixed = [replace(GREEDY, max_tokens=1), replace(wide, top_k=1), replace(wide, top_k=325), replace(wide, top_k=0)]
    drawn = [texts(llm, ["L"] * 4, [replace(params, seed=seed) for params in mixed]) for seed in range(100)]
    assert {row[0] for row in drawn} == {row[1] for row in drawn} == {"x"}
    assert {row[2] for row in drawn} == {"x", "y", "z"}
    assert [row[2] for row in drawn] == [row[3] for row in drawn], "above the vocabulary is off: the same draws"


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(0.5, (0.86681, 0.11731, 0.01588)), (1.0, (0.66524, 0.24473, 0.09003)), (2.0, (0.50648, 0.30720, 0.18632))],
)
def test_c20_draws_follow_the_distribution(llm: LLM, temperature: float, expected: tuple[float, ...]) -> None:
    number = 2000
    params = [SamplingParams(temperature=temperature, max_tokens=1, seed=seed) for seed in range(number)]
    counts = Counter(texts(llm, ["L"] * number, params))
    for token, probability in zip("xyz", expected, strict=True):
        deviation = (probability * (1 - probability) / number) ** 0.5
        assert abs(counts[token] / number - probability) < 4 * deviation


def test_c20_min_p_drops_the_tail(llm: LLM) -> None:
    # z has 0.135 of x's probability, y has 0.368.
    assert set(texts(llm, ["L"] * 500, SamplingParams(min_p=0.2, max_tokens=1))) == {"x", "y"}
    assert set(texts(llm, ["L"] * 100, SamplingParams(min_p=0.5, max_tokens=1))) == {"x"}
    assert set(texts(llm, ["L"] * 500, SamplingParams(top_p=0.9, max_tokens=1))) == {"x", "y"}


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 256), (2, 256), (3, 256), (2, 12)])
def test_c22_a_seed_holds_whatever_runs_beside_it(tmp_path: Path, depth: int, num_blocks: int) -> None:
    folder, _ = hist_checkpoint(tmp_path)
    mine, *others = random_prompts([9, 3, 14, 6, 1, 11, 8, 5])
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=24)
    with LLM(folder, device="cpu", num_blocks=num_blocks, block_size=4, depth=depth) as llm:
        [alone] = llm.generate([mine], seeded)
        for neighbours in range(8):
            # Other seeds and none, in front and behind, so that the row differs as well.
            beside = [replace(seeded, seed=None if i % 2 else i, max_tokens=5 + 3 * i) for i in range(neighbours)]
            place = neighbours // 2
            prompts = [*others[:place], mine, *others[place:neighbours]]
            outputs = llm.generate(prompts, [*beside[:place], seeded, *beside[place:]])
            assert outputs[place].outputs[0].token_ids == alone.outputs[0].token_ids
        if num_blocks == 12:
            assert llm.counters().preemptions > 0


def test_c22_without_a_seed_runs_differ(llm: LLM, folder: Path) -> None:
    # These six letters follow each other with equal chances, and none of them ends a text.
    params = SamplingParams(max_tokens=32, allowed_token_ids=[*b"FGHIJK"])
    first, second = texts(llm, ["F", "F"], params)
    assert first != second
    assert len(set(first)) > 1, "the noise of one request is not the same at every token"
    with LLM(folder, **CPU) as fresh:
        assert texts(fresh, "F", params)[0] not in {first, second}


@pytest.mark.parametrize("bad", [-1, 320, 2**63, 1.5, True, "7", None])
def test_c25_ids_outside_the_vocabulary_are_refused(llm: LLM, bad: Any) -> None:
    good = "a"
    with pytest.raises(ValueError, match=r"^prompts\[1\]\[2\]="):
        llm.generate([good, [97, 98, bad]], GREEDY)
    with pytest.raises(ValueError, match=r"prompts\[0\].prompt_token_ids\[0\]="):
        llm.generate([{"prompt_token_ids": [bad, 97]}], GREEDY)
    with pytest.raises(ValueError, match="stop_token_ids"):
        llm.generate(good, SamplingParams(temperature=0, stop_token_ids=[bad]))
    assert texts(llm, [good, good], GREEDY) == ["bcde", "bcde"]


EOS_FORMS: dict[str, Any] = {"list": [BYTE_EOS, BYTE_IM_END], "int": BYTE_IM_END, "null": None, "absent": ...}


@pytest.mark.parametrize("form", EOS_FORMS)
@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c37_every_eos_ends(tmp_path: Path, form: str, where: str, depth: int) -> None:
    table_checkpoint(tmp_path, chain("A", BYTE_EOS, "q"), chain("B", BYTE_IM_END, "q"), rows(q={"q": 5.0}))
    for name in ("generation_config.json", "config.json"):
        content = json.loads((tmp_path / name).read_text())
        content.pop("eos_token_id", None)
        if name == where and EOS_FORMS[form] is not ...:
            content["eos_token_id"] = EOS_FORMS[form]
        (tmp_path / name).write_text(json.dumps(content))
    with LLM(tmp_path, **CPU, depth=depth) as llm:
        ends = {*[BYTE_EOS], *([BYTE_IM_END] if form in {"list", "int"} else [])}
        assert llm.eos_token_ids == ends, "the tokenizer's is always one of them"
        for prompt, token in (("A", BYTE_EOS), ("B", BYTE_IM_END)):
            [output] = llm.generate(prompt, replace(GREEDY, max_tokens=4))
            ended = token in ends
            assert output.outputs[0].finish_reason == ("stop" if ended else "length")
            assert output.outputs[0].token_ids == ([token] if ended else [token, *b"qqq"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c37_without_any_eos_it_runs_to_the_limit(tmp_path: Path, depth: int) -> None:
    table_checkpoint(tmp_path, chain("A", BYTE_EOS, "q"), rows(q={"q": 5.0}), eos_token_id=None)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del content["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    with LLM(tmp_path, **CPU, depth=depth) as llm:
        assert llm.eos_token_ids == frozenset()
        [output] = llm.generate("A", replace(GREEDY, max_tokens=4))
    assert output.outputs[0].token_ids == [BYTE_EOS, *b"qqq"]
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c37_min_tokens_holds_back_every_end(tmp_path: Path, depth: int) -> None:
    ends = {BYTE_EOS: 9.0, BYTE_IM_END: 8.0, ord("s"): 7.0, ord("E"): 5.0}
    table_checkpoint(tmp_path, {ord("E"): ends}, eos_token_id=[BYTE_EOS, BYTE_IM_END])
    with LLM(tmp_path, **CPU, depth=depth) as llm:
        [output] = llm.generate("E", replace(GREEDY, min_tokens=5, stop_token_ids=[ord("s")]))
    assert output.outputs[0].token_ids == [*b"EEEEE", BYTE_EOS]
    with pytest.raises(ValueError, match="min_tokens=3 must not be above max_tokens=2"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c34_the_token_that_ends_has_no_text_but_keeps_its_id(tmp_path: Path, skip: bool, depth: int) -> None:
    table_checkpoint(tmp_path, chain("A", "h", BYTE_IM_END, "i", BYTE_EOS, "m", "m"))
    shown = SamplingParams(temperature=0, max_tokens=8, skip_special_tokens=skip)
    mark, end = ("", "") if skip else ("<|im_end|>", "</s>")
    with LLM(tmp_path, **CPU, depth=depth) as llm:
        [eos] = llm.generate("A", shown)
        assert eos.outputs[0].text == f"h{mark}i"
        assert eos.outputs[0].token_ids[-1] == BYTE_EOS
        assert eos.outputs[0].stop_reason is None
        for stop, text in ((BYTE_IM_END, "h"), (ord("i"), f"h{mark}")):
            [stopped] = llm.generate("A", replace(shown, stop_token_ids=[stop]))
            assert stopped.outputs[0].text == text
            assert stopped.outputs[0].token_ids[-1] == stop
            assert stopped.outputs[0].stop_reason == stop
            assert stopped.outputs[0].finish_reason == "stop"
        [past] = llm.generate("A", replace(shown, ignore_eos=True))
        assert past.outputs[0].text == f"h{mark}i{end}mmmm"
        [still] = llm.generate("A", replace(shown, ignore_eos=True, stop_token_ids=[ord("m")]))
        assert still.outputs[0].text == f"h{mark}i{end}"
