"""The text side of a request against ``LLM.generate``: the same answers through another process, in deltas."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fixtures.engine_clients import ClientInLoop, answer, is_idle, until
from fixtures.served_models import CPU, GREEDY, chain, hist_checkpoint, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import LLM, EngineConfig, RequestOutput, SamplingParams
from gapless.errors import PromptTooLongError, RequestError
from gapless.server.choice_text import ChoiceText
from gapless.server.generation import ChoiceDelta
from gapless.text.stop_strings import StopStringCheck

EMOJI = "\U0001f600".encode()
CONFIG = EngineConfig(device="cpu", num_blocks=256)
ENDLESS = SamplingParams(temperature=0, max_tokens=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain(*"abcdefgh", BYTE_EOS),
        chain(">", *EMOJI, "A", "B", BYTE_EOS),
        chain("<", *"\u20ac".encode()[:2], "C", BYTE_EOS),
        chain("1", "2", 259, "3", BYTE_EOS),
        rows(S={"S": 5.0}, L={"L": 2.0, "M": 1.5}, M={"L": 1.0, "M": 1.0, "N": 0.5}, N={"L": 1.0}),
        nan_tokens=[ord("!")],
        max_position_embeddings=4096,
    )


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ClientInLoop]:
    with ClientInLoop(folder, CONFIG) as made:
        yield made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **CPU) as made:
        yield made


def plain(output: RequestOutput) -> dict[str, Any]:
    """What must not depend on which process the engine is in."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "prompt_logprobs": output.prompt_logprobs,
        "outputs": output.outputs,
        "finished": output.finished,
    }


OPTIONS = {
    "eos": {},
    "length": {"max_tokens": 3},
    "nothing": {"max_tokens": 0},
    "ids only": {"detokenize": False},
    "ignore eos": {"ignore_eos": True, "max_tokens": 12},
    "stop token": {"stop_token_ids": [ord("d")]},
    "stop inside": {"stop": ["de"]},
    "stop kept": {"stop": ["de"], "include_stop_str_in_output": True},
    "stop across": {"stop": ["cdef", "zz"]},
    "stop nested": {"stop": ["d", "cdeX", "bcdefghi"]},
    "stop too early": {"stop": ["b", "fg"], "min_tokens": 3},
    "stop at the end": {"stop": ["h"]},
    "stop never": {"stop": ["hh"]},
    "stop half": {"stop": ["ghx"]},
    "special text stops": {"stop": ["<|im_end|>"]},
    "special text shown": {"skip_special_tokens": False},
    "choices": {"n": 3},
    "choices that stop": {"n": 3, "stop": ["ef"], "logprobs": 1},
    "log-probs": {"logprobs": 5},
    "log-probs of the chosen": {"logprobs": 0, "stop": ["fg"]},
    "prompt log-probs": {"prompt_logprobs": 2, "logprobs": 2},
    "prompt log-probs only": {"prompt_logprobs": 0, "max_tokens": 0},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "max_tokens": 20},
    "bias": {"logit_bias": {ord("x"): 100.0}, "max_tokens": 4},
    "allowed": {"allowed_token_ids": [ord("x"), ord("y")], "max_tokens": 4, "logprobs": 2},
    "bad words": {"bad_words": ["d", "bc"], "max_tokens": 6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("prompt", ["a", "12", ">", "<", "abc", "h!"])
def test_the_answer_is_that_of_the_same_request_offline(
    served: ClientInLoop, llm: LLM, prompt: str, options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, **{"max_tokens": 64, **options})
    [expected] = llm.generate([prompt], params)
    assert plain(served.run(answer(served.client, prompt, params))) == plain(expected)


@pytest.mark.parametrize("seed", range(4))
def test_seeded_answers_are_those_of_the_same_request_offline(served: ClientInLoop, llm: LLM, seed: int) -> None:
    params = SamplingParams(temperature=1.0, seed=seed, n=4, max_tokens=40, logprobs=3, stop=["MML", "NLLL"])
    [expected] = llm.generate(["L"], params)
    assert plain(served.run(answer(served.client, "L", params))) == plain(expected)
    assert len({output.text for output in expected.outputs}) > 1


def test_many_at_once_each_get_their_own_answer(tmp_path: Path) -> None:
    made, _ = hist_checkpoint(tmp_path / "hist", vocab_size=320)
    prompts = [[1 + index, 7, index % 5] for index in range(40)]
    params = [SamplingParams(temperature=0, max_tokens=4 + index % 17) for index in range(40)]
    with LLM(made, **CPU) as llm:
        expected = llm.generate(prompts, params)

    async def all_of_them() -> list[RequestOutput]:
        each = zip(prompts, params, strict=True)
        return await asyncio.gather(*(answer(served.client, prompt, wanted) for prompt, wanted in each))

    with ClientInLoop(made, EngineConfig(device="cpu", num_blocks=256, max_rows=16)) as served:
        found = served.run(all_of_them())
        assert [plain(output) for output in found] == [plain(output) for output in expected]
        assert is_idle(served.run(until(served.client, is_idle)))


def test_a_failed_request_says_so_and_the_others_go_on(served: ClientInLoop) -> None:
    async def both() -> list[RequestOutput]:
        return await asyncio.gather(answer(served.client, "a!", GREEDY), answer(served.client, "a", GREEDY))

    failed, fine = served.run(both())
    assert failed.outputs[0].finish_reason == "error"
    assert "not finite" in (failed.outputs[0].error or "")
    assert fine.outputs[0].text == "bcdefgh"


async def _deltas(served: ClientInLoop, prompt: Any, params: SamplingParams, delay_s: float = 0.0) -> list[ChoiceDelta]:
    found = []
    async with await served.client.submit(await served.client.prepare_prompt(prompt), params) as generation:
        async for deltas in generation:
            found += deltas
            await asyncio.sleep(delay_s)
        assert generation.finished
        assert generation.num_completion_tokens == sum(len(delta.token_ids) for delta in found)
        assert generation.num_prompt_tokens == len(generation.prompt.token_ids)
    return found


def test_deltas_add_up(served: ClientInLoop) -> None:
    deltas = served.run(_deltas(served, "a", SamplingParams(temperature=0, max_tokens=64, n=2, stop=["gh"])))
    for index in range(2):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == "bcdef"
        assert [token for delta in own for token in delta.token_ids] == [*b"bcdefgh"]
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1].stop_reason == "gh"
        assert all(delta.text or delta.token_ids or delta.finish_reason for delta in own)


def test_c31_text_never_changes_once_given_out(served: ClientInLoop) -> None:
    deltas = served.run(_deltas(served, ">", GREEDY))
    assert "".join(delta.text for delta in deltas) == "\U0001f600AB"
    assert all("\ufffd" not in delta.text for delta in deltas)
    cut = served.run(_deltas(served, ">", SamplingParams(temperature=0, max_tokens=3)))
    assert "".join(delta.text for delta in cut[:-1]) == ""
    assert cut[-1].text == "\ufffd"


def test_c31_a_slow_consumer_gets_all_in_fewer_deltas(served: ClientInLoop) -> None:
    params = SamplingParams(temperature=0, max_tokens=500)
    deltas = served.run(_deltas(served, "S", params, delay_s=0.1))
    assert "".join(delta.text for delta in deltas) == "S" * 500
    assert [token for delta in deltas for token in delta.token_ids] == [ord("S")] * 500
    assert len(deltas) < 100


def test_a_stop_string_ends_the_engines_work_even_if_nobody_reads(served: ClientInLoop) -> None:
    async def never_reads() -> None:
        client = served.client
        params = replace(ENDLESS, stop="SSSS")
        generation = await client.submit(await client.prepare_prompt("S"), params)
        before = await client.counters()
        await until(client, is_idle, 5.0)
        assert (await client.counters()).output_tokens - before.output_tokens < 4000
        assert generation.finished
        output = await generation.result()
        assert output.outputs[0].token_ids == [ord("S")] * 4
        assert output.outputs[0].text == ""

    served.run(never_reads())


def test_cached_prompt_tokens_are_told(served: ClientInLoop) -> None:
    prompt = "cached prompts are told of: " * 4

    async def twice(salts: Sequence[bytes]) -> list[int]:
        return [(await answer(served.client, prompt, GREEDY, salt=salt)).num_cached_tokens for salt in salts]

    first, second = served.run(twice([b"", b""]))
    assert first == 0
    assert second >= len(prompt) // 16 * 16 - 16
    assert served.run(twice([b"one", b"two", b"one"]))[:2] == [0, 0]
    assert served.run(twice([b"one"]))[0] > 0


def test_metrics_are_in_order(served: ClientInLoop) -> None:
    metrics = served.run(answer(served.client, "a", GREEDY)).metrics
    assert metrics is not None
    assert metrics.first_token_s is not None
    assert metrics.finished_s is not None
    assert metrics.arrived_s < metrics.first_token_s <= metrics.finished_s
    assert metrics.tpot_s(8) is not None


def test_what_cannot_be_served_is_refused_before_it_is_queued(served: ClientInLoop) -> None:
    async def refused(prompt: Any, params: SamplingParams) -> None:
        await answer(served.client, prompt, params)

    with pytest.raises(PromptTooLongError, match="max_model_len=4096"):
        served.run(refused([1] * 5000, GREEDY))
    with pytest.raises(RequestError, match=r"prompt\[0\]=320"):
        served.run(refused([320], GREEDY))
    with pytest.raises(RequestError, match="stop_token_ids=500"):
        served.run(refused("a", SamplingParams(stop_token_ids=[500])))
    with pytest.raises(RequestError, match="logprobs=-1"):
        served.run(refused("a", SamplingParams(logprobs=-1)))
    with pytest.raises(RequestError, match="empty"):
        served.run(refused("", GREEDY))
    assert is_idle(served.run(served.client.counters()))
    assert served.run(answer(served.client, "a", GREEDY)).outputs[0].text == "bcdefgh"


def test_defaults_are_the_models(folder: Path) -> None:
    with ClientInLoop(folder, CONFIG, override_generation_config={"max_new_tokens": 2}) as served:
        assert served.client.get_default_sampling_params().max_tokens == 2
        assert served.run(answer(served.client, "a", SamplingParams(temperature=0))).outputs[0].text == "bc"
        assert served.run(answer(served.client, "a", GREEDY)).outputs[0].text == "bcdefgh"


STOPS = [(), ("de",), ("d", "cdeX"), ("gh",), ("ghx",), ("cdef",)]


@pytest.mark.parametrize(("stops", "reason"), list(product(STOPS, ["stop", "length", "abort"])))
def test_a_choice_does_not_depend_on_how_its_news_are_cut(llm: LLM, stops: tuple[str, ...], reason: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=64, stop=list(stops) or None)
    tokens = [*b"bcdefgh"] + ([BYTE_EOS] if reason == "stop" else [])

    def told(sizes: Sequence[int]) -> tuple[str, list[int], Any, Any, int]:
        text = ChoiceText(0, params, llm.tokenizer, llm_check(llm, params))
        deltas, start = [], 0
        for size in sizes:
            text.add(tokens[start : start + size])
            start += size
            deltas.append(text.take())
        text.end(reason, tokens[start:])
        deltas.append(text.take())
        assert text.take() is None
        given = [delta for delta in deltas if delta is not None]
        ids = [token for delta in given for token in delta.token_ids]
        assert text.num_tokens == len(ids)
        return "".join(delta.text for delta in given), ids, given[-1].finish_reason, given[-1].stop_reason, len(ids)

    whole = told([])
    for first, second in product(range(8), range(8)):
        if first + second <= 7:
            assert told([first, second]) == whole
    assert told([1] * 7) == whole


def llm_check(llm: LLM, params: SamplingParams) -> StopStringCheck | None:
    """A judge as ``LLM`` makes it."""
    if not params.stops:
        return None
    return StopStringCheck(llm.tokenizer, params.stops, skip_special_tokens=True)
