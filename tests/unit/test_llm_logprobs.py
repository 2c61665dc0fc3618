"""Log-probs through ``LLM``: of sampled tokens and of prompts, whatever else is asked, at every depth."""

import asyncio
import gc
import json
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fixtures.served_models import CPU, ROW_L, chain, hist_checkpoint, random_prompts, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import LLM, AsyncLLM, SamplingParams
from gapless.outputs import RequestOutput, TokenLogprobsById

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ONE = SamplingParams(temperature=0, max_tokens=1)
X, Y, Z = b"xyz"
EXPECTED = {X: -0.407606, Y: -1.407606, Z: -2.407606}
# Deep and tight: 12 blocks of 4 hold two or three of these requests, so the others are preempted on their way.
SETTINGS: list[dict[str, Any]] = [
    {"depth": 1, "num_blocks": 256},
    {"depth": 2, "num_blocks": 256},
    {"depth": 3, "num_blocks": 256},
    {"depth": 1, "num_blocks": 12},
    {"depth": 2, "num_blocks": 12, "chunk_size": 3},
    {"depth": 3, "num_blocks": 12, "chunk_size": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # -inf itself would make NaN of the zeros it is multiplied with.
    impossible = {ord("I"): {X: 1.0, Y: -1e6, Z: -1e6}}
    parts = (rows(L=ROW_L), chain(*"abcde", BYTE_EOS), impossible)
    return table_checkpoint(tmp_path_factory.mktemp("table"), *parts, nan_tokens=[ord("N")])


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    return hist_checkpoint(tmp_path_factory.mktemp("hist"))


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda depth: f"depth{depth}")
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(folder, **CPU, depth=request.param) as made:
        yield made


def rated(output: RequestOutput) -> list[TokenLogprobsById]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    return completion.logprobs


@pytest.mark.parametrize("temperature", [0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_c26_values_are_those_of_the_raw_logits(llm: LLM, temperature: float, filters: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=1, seed=3, logprobs=3, **filters)
    [output] = llm.generate("L", params)
    [place] = rated(output)
    [token] = output.outputs[0].token_ids
    assert next(iter(place)) == token, "the sampled token comes first"
    for rank, (other, logprob) in enumerate(EXPECTED.items(), 1):
        assert place[other].logprob == pytest.approx(logprob, abs=1e-4)
        assert place[other].rank == rank
        assert place[other].decoded_token == chr(other)
    assert output.outputs[0].cumulative_logprob == place[token].logprob


def test_c26_biases_and_penalties_do_not_change_them_either(llm: LLM) -> None:
    odd = replace(ONE, logprobs=2, logit_bias={Z: 100.0}, repetition_penalty=3.0, bad_words=["x"])
    [output] = llm.generate("xyL", odd)
    [place] = rated(output)
    assert output.outputs[0].text == "z"
    assert list(place) == [Z, X, Y]
    for token, logprob in EXPECTED.items():
        assert place[token].logprob == pytest.approx(logprob, abs=1e-4)
    assert place[Z].rank == 3


def test_c26_the_sampled_token_is_there_even_outside_the_top(llm: LLM) -> None:
    for number in (0, 1, 2):
        [output] = llm.generate("L", replace(ONE, logprobs=number, allowed_token_ids=[Z]))
        [place] = rated(output)
        assert list(place) == [Z, X, Y][: 1 + number]
        assert place[Z].logprob == pytest.approx(-2.407606, abs=1e-4)
        assert place[Z].rank == 3


def test_c26_impossible_values_have_a_finite_floor_and_fit_into_json(llm: LLM) -> None:
    [output] = llm.generate("I", replace(ONE, logprobs=20, allowed_token_ids=[X, Y]))
    [place] = rated(output)
    assert place[X].logprob == pytest.approx(0, abs=1e-4)
    [prompt] = llm.generate("IyIx", replace(ONE, prompt_logprobs=0, max_tokens=0))
    assert prompt.prompt_logprobs is not None
    values = [None if each is None else next(iter(each.values())).logprob for each in prompt.prompt_logprobs]
    assert values[1] == -9999.0
    parsed = json.loads(json.dumps(values, allow_nan=False))
    assert parsed[3] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("bad", [21, -2, 1.0, True, "3"])
def test_c26_other_numbers_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        SamplingParams(**{name: bad})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c26_the_whole_vocabulary_sums_to_one(folder: Path, depth: int) -> None:
    """Ten such requests, where four may run at once, between others."""
    everything = SamplingParams(temperature=1.0, seed=7, max_tokens=2, logprobs=-1)
    with LLM(folder, **CPU, depth=depth) as llm:
        outputs = llm.generate(["L"] * 12, [replace(ONE, logprobs=2), *[everything] * 10, ONE])
    assert len(rated(outputs[0])[0]) == 2
    for output in outputs[1:11]:
        for place, token in zip(rated(output), output.outputs[0].token_ids, strict=True):
            assert len(place) == 320
            assert next(iter(place)) == token
            assert sum(math.exp(each.logprob) for each in place.values()) == pytest.approx(1, abs=1e-4)
        first = rated(output)[0]
        for rank, (other, logprob) in enumerate(EXPECTED.items(), 1):
            assert first[other].logprob == pytest.approx(logprob, abs=1e-4)
            assert first[other].rank == rank


def test_c26_the_whole_vocabulary_is_for_sampled_tokens_only() -> None:
    with pytest.raises(ValueError, match="prompt_logprobs=-1 must be from 0 to 20"):
        SamplingParams(prompt_logprobs=-1)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c26_only_who_asks_gets_them_and_each_as_many(folder: Path, depth: int) -> None:
    with LLM(folder, **CPU, depth=depth) as llm:
        wanted = [None, 3, 0, None, 20, 1]
        outputs = llm.generate(["a"] * 6, [replace(GREEDY, logprobs=number) for number in wanted])
        for output, number in zip(outputs, wanted, strict=True):
            assert output.outputs[0].token_ids == [*b"bcde", BYTE_EOS]
            if number is None:
                assert output.outputs[0].logprobs is None
                assert output.outputs[0].cumulative_logprob is None
            else:
                # What is sampled past the end at a depth above 1 leaves no trace.
                assert [len(place) for place in rated(output)] == [max(number, 1)] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c18_log_probs_are_finite_at_tiny_temperatures(folder: Path, dtype: Any, depth: int) -> None:
    with LLM(folder, **CPU, depth=depth, dtype=dtype) as llm:
        for temperature in (0, 1e-6, 1e-5, 1e-4):
            [output] = llm.generate("L", SamplingParams(temperature=temperature, max_tokens=1, logprobs=3))
            [place] = rated(output)
            assert output.outputs[0].text == "x"
            assert place[X].logprob == pytest.approx(-0.407606, abs=1e-4 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting.values())))
def test_c26_as_transformers_across_preemption(hist: tuple[Path, PreTrainedModel], setting: dict[str, Any]) -> None:
    """Also C12: half of the prompts share their start, and ask for its log-probs too."""
    folder, model = hist
    prompts = random_prompts([9, 3, 14, 6, 1, 11, 8, 5])
    prompts[6] = [*prompts[2][:12], 7]
    params = [
        SamplingParams(
            temperature=0.8 * (index % 2),
            seed=index,
            max_tokens=20,
            logprobs=index % 4,
            prompt_logprobs=index % 3 if index % 2 == 0 else None,
            repetition_penalty=1.0 + 0.2 * (index % 3),
        )
        for index in range(8)
    ]
    with LLM(folder, device="cpu", block_size=4, **setting) as llm:
        outputs = llm.generate(prompts, params)
        if setting["num_blocks"] == 12:
            assert llm.counters().preemptions > 0
        assert llm.counters().used_blocks == 0
    for prompt, each, output in zip(prompts, params, outputs, strict=True):
        answer = output.outputs[0].token_ids
        assert len(answer) == 20
        truth = reference(model, [*prompt, *answer])
        check_places(rated(output), answer, truth[len(prompt) - 1 :], each.logprobs or 0)
        if each.prompt_logprobs is None:
            assert output.prompt_logprobs is None
            continue
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        after = [place for place in output.prompt_logprobs[1:] if place is not None]
        assert len(after) == len(prompt) - 1
        check_places(after, prompt[1:], truth, each.prompt_logprobs)


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c12_a_cached_prompt_gives_the_same(
    hist: tuple[Path, PreTrainedModel], chunk_size: int | None, depth: int
) -> None:
    folder, model = hist
    [prompt] = random_prompts([40])
    params = replace(ONE, prompt_logprobs=2)
    with LLM(folder, device="cpu", depth=depth, num_blocks=32, block_size=16, chunk_size=chunk_size) as llm:
        [cold] = llm.generate([prompt], params)
        [plain] = llm.generate([prompt], ONE)
        [warm] = llm.generate([prompt], params)
        assert plain.num_cached_tokens == 32, "two and a half blocks: two of them are cached"
        assert warm.num_cached_tokens == 0
    for output in (cold, warm):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        after = [place for place in output.prompt_logprobs if place is not None]
        check_places(after, prompt[1:], reference(model, prompt), 2)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c12_what_is_aborted_leaves_nothing(hist: tuple[Path, PreTrainedModel], depth: int) -> None:
    folder, _ = hist
    with LLM(folder, device="cpu", depth=depth, num_blocks=128, block_size=4, chunk_size=2) as llm:
        engine = llm._engine
        made: list[weakref.ref[Any]] = []
        applier = engine._applier
        requests = [
            llm._engine_request(prepared(prompt), replace(GREEDY, prompt_logprobs=20), streams=True)
            for prompt in random_prompts([60] * 50)
        ]
        ids = engine.submit(requests, lambda ids: None)
        while not any(len(r.prompt_logprobs or ()) > 5 for r in list(applier.live.values())):
            pass
        made = [weakref.ref(array) for r in list(applier.live.values()) for array in [r.prompt]]
        engine.abort(ids)
        while applier.live:
            pass
        [output] = llm.generate([[1, 2, 3]], replace(ONE, prompt_logprobs=0))
        assert output.prompt_logprobs is not None
        del requests
        gc.collect()
        assert len(made) == 50
        assert not [alive for alive in made if alive() is not None]
        assert llm.counters().used_blocks == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c28_scoring_a_prompt_without_sampling(folder: Path, depth: int) -> None:
    with LLM(folder, **CPU, depth=depth) as llm:
        before = llm.counters().steps
        [output] = llm.generate("Lx", SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert llm.counters().steps == before + 1, "no decode step"
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"
        assert output.prompt_logprobs is not None
        first, second = output.prompt_logprobs
        assert first is None
        assert second is not None
        assert second[X].logprob == pytest.approx(-0.407606, abs=1e-4)
        [one_more] = llm.generate("Lx", replace(ONE, prompt_logprobs=1, logprobs=1))
        assert one_more.prompt_logprobs == output.prompt_logprobs
        assert len(rated(one_more)) == 1
        [single] = llm.generate("L", SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert single.prompt_logprobs == [None]
        with pytest.raises(ValueError, match="max_tokens=-1"):
            SamplingParams(max_tokens=-1)


@pytest.mark.parametrize("chunk_size", [None, 1, 16])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c28_forty_tokens_as_transformers(
    hist: tuple[Path, PreTrainedModel], chunk_size: int | None, depth: int
) -> None:
    folder, model = hist
    prompts = random_prompts([40, 40, 2, 1])
    params = SamplingParams(max_tokens=0, prompt_logprobs=20)
    with LLM(folder, device="cpu", depth=depth, num_blocks=64, chunk_size=chunk_size, token_budget=50) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt)
            after = [place for place in output.prompt_logprobs if place is not None]
            check_places(after, prompt[1:], reference(model, prompt), 20)


def test_a_prompt_with_nan_fails_and_says_so(llm: LLM) -> None:
    bad, good = llm.generate(["aNb", "Lx"], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert bad.outputs[0].finish_reason == "error"
    assert bad.prompt_logprobs is None
    assert good.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("depth", [1, 3])
def test_c26_streamed_log_probs_grow_with_the_ids(folder: Path, depth: int) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1, n=2, seed=1, stop="d")

    async def collect() -> list[RequestOutput]:
        async with AsyncLLM(folder, **CPU, depth=depth) as llm:
            return [output async for output in llm.generate("Lxa", params)]

    snapshots = asyncio.run(collect())
    with LLM(folder, **CPU, depth=depth) as llm:
        [whole] = llm.generate("Lxa", params)
    for output in snapshots:
        for choice in output.outputs:
            assert choice.logprobs is not None
            assert [next(iter(place)) for place in choice.logprobs] == choice.token_ids
    last = snapshots[-1]
    assert last.prompt_logprobs == whole.prompt_logprobs
    assert last.prompt_logprobs is not None
    assert last.prompt_logprobs[1] is not None
    for streamed, blocking in zip(last.outputs, whole.outputs, strict=True):
        assert streamed.token_ids == [*b"bcd"], "what came behind the stop string leaves no log-prob"
        assert streamed.logprobs == blocking.logprobs
        assert streamed.cumulative_logprob == blocking.cumulative_logprob


def test_choices_share_the_log_probs_of_their_prompt(llm: LLM) -> None:
    [output] = llm.generate("Lx", SamplingParams(n=3, seed=1, max_tokens=2, logprobs=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[1] is not None
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert [next(iter(place)) for place in choice.logprobs] == choice.token_ids


def prepared(prompt: list[int]) -> Any:
    from gapless.prompts import PreparedPrompt

    return PreparedPrompt(text=None, token_ids=prompt)


def reference(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-softmax of what transformers gives after each of ``ids``."""
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def check_places(places: list[TokenLogprobsById], tokens: list[int], truth: torch.Tensor, number: int) -> None:
    """Each place holds its token and the ``number`` most likely ones, with the values and ranks of ``truth``."""
    assert len(places) == len(tokens)
    for place, token, row in zip(places, tokens, truth, strict=False):
        top = row.topk(number).indices.tolist()
        assert set(place) == {token, *top}
        for other, found in place.items():
            assert found.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert found.rank == int((row > row[other]).sum()) + 1
