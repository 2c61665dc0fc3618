"""Penalties through ``LLM``: what they look at, and that a token counts in the very next step at every depth."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fixtures.served_models import CPU, hist_checkpoint, random_prompts, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ROW_A = {ord("A"): {ord("A"): 5.0, ord("B"): 4.2}, ord("B"): {BYTE_EOS: 5.0}}
# Deep and tight: 12 blocks of 4 hold two of these requests, so the others are preempted on their way.
SETTINGS: list[dict[str, Any]] = [
    {"depth": 1, "num_blocks": 256},
    {"depth": 2, "num_blocks": 256},
    {"depth": 3, "num_blocks": 256},
    {"depth": 1, "num_blocks": 12},
    {"depth": 2, "num_blocks": 12},
    {"depth": 3, "num_blocks": 12},
    {"depth": 3, "num_blocks": 12, "chunk_size": 3},
    {"depth": 2, "num_blocks": 256, "enable_prefix_caching": False},
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(tmp_path_factory.mktemp("table"), ROW_A, rows(L={"x": 2.0, "y": 1.5, "z": -1.0}))


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return hist_checkpoint(tmp_path_factory.mktemp("hist"))


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda depth: f"depth{depth}")
def llm(table: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(table, **CPU, depth=request.param) as made:
        yield made


def texts(llm: LLM, prompts: Any, params: Any) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c01_a_token_counts_in_the_next_step(table: Path, depth: int) -> None:
    frequency, presence = replace(GREEDY, frequency_penalty=0.5), replace(GREEDY, presence_penalty=1.0)
    with LLM(table, **CPU, depth=depth) as llm:
        assert texts(llm, "A", frequency) == ["AAB"], "one step late it would be AAAB"
        assert texts(llm, "A", presence) == ["AB"], "one step late it would be AAB"
        mixed = [frequency, presence, GREEDY, frequency, replace(GREEDY, max_tokens=3), presence, GREEDY, presence]
        outputs = llm.generate(["A"] * 8, mixed)
        assert [o.outputs[0].text for o in outputs] == ["AAB", "AB", "A" * 8, "AAB", "AAA", "AB", "A" * 8, "AB"]
        assert outputs[0].outputs[0].token_ids == [*b"AAB", BYTE_EOS]
        assert llm.counters().used_blocks == 0


def test_c01_negative_penalties_keep_a_token(llm: LLM) -> None:
    assert texts(llm, "A", replace(GREEDY, logit_bias={ord("B"): 0.9}, max_tokens=3)) == ["B"]
    # B is ahead by 0.1 once; what repeats wins from then on.
    biased = replace(GREEDY, logit_bias={ord("B"): 0.7}, frequency_penalty=-0.5)
    assert texts(llm, "A", biased) == ["A" * 8]


def test_c24_repetition_sees_the_prompt_and_the_others_do_not(llm: LLM) -> None:
    one = replace(GREEDY, max_tokens=1)
    assert texts(llm, "xL", replace(one, repetition_penalty=2.0)) == ["y"]
    assert texts(llm, "xL", replace(one, presence_penalty=2.0)) == ["x"]
    assert texts(llm, "xL", replace(one, frequency_penalty=2.0)) == ["x"]
    assert texts(llm, "xL", one) == ["x"]


def test_c24_a_negative_logit_is_multiplied(tmp_path: Path) -> None:
    table_checkpoint(tmp_path, rows(L={"z": -1.0, "y": -1.5}))
    with LLM(tmp_path, **CPU) as llm:
        # z becomes -2 below y's -1.5; divided, it would be -0.5 and stay ahead.
        assert texts(llm, "zL", replace(GREEDY, max_tokens=1, repetition_penalty=2.0)) == ["y"]


def test_c24_a_request_without_penalties_is_unchanged_by_neighbours(hist: tuple[Path, PreTrainedModel]) -> None:
    prompts = random_prompts([9, 3, 14, 6])
    plain = SamplingParams(temperature=0.8, seed=3, max_tokens=12)
    penalised = replace(
        plain, repetition_penalty=3.0, frequency_penalty=2.0, logit_bias={5: -100.0}, bad_words=[[1, 2]]
    )
    with LLM(hist[0], device="cpu", num_blocks=64) as llm:
        [alone] = llm.generate([prompts[0]], plain)
        outputs = llm.generate(prompts, [plain, penalised, penalised, penalised])
        assert outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_c24_as_transformers_in_a_mixed_batch_and_across_preemption(
    hist: tuple[Path, PreTrainedModel], setting: dict[str, Any]
) -> None:
    folder, model = hist
    prompts = random_prompts([9, 3, 14, 6, 1, 11, 8, 5])
    # A shared start: the second of them finds it in the prefix cache, and still has to count it.
    prompts[6] = [*prompts[2][:12], 7]
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {},
        {"repetition_penalty": 2.5},
        {"bad_words_ids": [[3], [17, 4], [60, 61, 62]]},
        {"repetition_penalty": 1.1, "sequence_bias": {(40,): 4.0, (41,): -3.0}},
        {"repetition_penalty": 0.8},
        {"repetition_penalty": 5.0},
        {"bad_words_ids": [[token, other] for token in range(8) for other in range(0, 128, 9)]},
    ]
    expected = [reference(model, prompt, 24, **each) for prompt, each in zip(prompts, options, strict=True)]
    with LLM(folder, device="cpu", block_size=4, **setting) as llm:
        outputs = llm.generate(prompts, [ours(each) for each in options])
        assert [output.outputs[0].token_ids for output in outputs] == expected
        if setting["num_blocks"] == 12:
            assert llm.counters().preemptions > 0
        assert llm.counters().used_blocks == 0


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2.1, 1e7, "1", None, True])
def test_c18_impossible_penalties_are_refused(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        llm.generate("L", SamplingParams(**{name: value}))
    assert texts(llm, "L", replace(GREEDY, max_tokens=1)) == ["x"]


def test_a_repetition_penalty_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^repetition_penalty=0"):
        SamplingParams(repetition_penalty=0)


def test_more_penalised_requests_than_wide_rows_wait_their_turn(
    hist: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    import gapless.pipeline.wide_rows as wide_rows

    folder, model = hist
    limits = wide_rows.WideLimits(max_rows=2, max_history=512, max_biases=128, max_word_inits=1)
    monkeypatch.setattr(wide_rows.WideLimits, "of_engine", staticmethod(lambda **sizes: limits))
    prompts = random_prompts([9, 3, 14, 6, 1, 11])
    expected = [reference(model, prompt, 10, repetition_penalty=1.5) for prompt in prompts]
    with LLM(folder, device="cpu", num_blocks=64) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.5))
        assert [output.outputs[0].token_ids for output in outputs] == expected


def ours(options: dict[str, Any]) -> SamplingParams:
    """The same options under our names."""
    bias = options.get("sequence_bias")
    return SamplingParams(
        temperature=0,
        max_tokens=24,
        repetition_penalty=options.get("repetition_penalty", 1.0),
        bad_words=options.get("bad_words_ids", ()),
        logit_bias=None if bias is None else {token: value for (token,), value in bias.items()},
    )


def reference(model: PreTrainedModel, prompt: list[int], max_tokens: int, **options: Any) -> list[int]:
    """What transformers answers, greedy."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    return [int(token) for token in whole[0, len(prompt) :]]
