"""Stop strings in ``LLM`` and ``AsyncLLM``: the same text, ids and reason at every depth and under preemption."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.served_models import CPU, GREEDY, chain, hist_checkpoint, random_prompts, reference_ids, table_checkpoint
from fixtures.served_models import rows as rows_of
from fixtures.tokenizers import BYTE_EOS, BYTE_IM_END, save_spm_tokenizer, spm_bytes, spm_id, spm_vocabulary
from gapless import LLM, AsyncLLM, RequestOutput, SamplingParams
from gapless.errors import RequestError

TOKENS = 24
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])
SMILE = "\U0001f600"


@dataclass(frozen=True)
class Case:
    """A prompt, its parameters, and what must come."""

    prompt: list[int]
    params: SamplingParams
    text: str
    num_ids: int
    ids: list[int]
    stop: str | None


@dataclass(frozen=True)
class Batch:
    folder: Path
    cases: list[Case]


def cut(ids: Sequence[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """Text, number of ids and stop string, where each id below 128 is a character."""
    text = bytes(ids).decode()
    found = []
    for stop in params.stops:
        start = text.find(stop)
        while start >= 0 and start + len(stop) < params.min_tokens:
            start = text.find(stop, start + 1)
        if start >= 0:
            found.append((start, len(stop), stop))
    if not found:
        return text, len(ids), None
    start, length, stop = min(found)
    return text[:start] + stop * params.include_stop_str_in_output, start + length, stop


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """16 requests with different stops, cut out of what the model answers without them."""
    folder, model = hist_checkpoint(tmp_path_factory.mktemp("hist"))
    prompts = random_prompts([3 + 2 * index for index in range(16)])
    chance = random.Random(29)
    cases = []
    for index, (prompt, ids) in enumerate(zip(prompts, reference_ids(model, prompts, TOKENS), strict=True)):
        text = bytes(ids).decode()
        stops = [chr(chance.randrange(128)) * 3]
        for _ in range(index % 4):
            start = chance.randrange(TOKENS)
            stops.append(text[start : start + chance.randint(1, 4)])
        params = SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            stop=stops,
            min_tokens=chance.choice([0, 0, 10]),
            include_stop_str_in_output=chance.random() < 0.3,
        )
        expected, num_ids, stop = cut(ids, params)
        cases.append(Case(prompt=prompt, params=params, text=expected, num_ids=num_ids, ids=ids[:num_ids], stop=stop))
    assert 6 <= sum(case.stop is not None for case in cases) <= 14
    return Batch(folder=folder, cases=cases)


def check(output: RequestOutput, case: Case) -> None:
    [completion] = output.outputs
    assert completion.text == case.text
    assert completion.token_ids == case.ids
    assert completion.finish_reason == ("length" if case.stop is None else "stop")
    assert completion.stop_reason == case.stop


# The tight cache holds the longest request twice, and a step takes few tokens.
@pytest.mark.parametrize(
    "options", [{"num_blocks": 400}, {"num_blocks": 30, "token_budget": 8}], ids=["ample", "tight"]
)
@DEPTHS
def test_c29_a_batch_with_stops_of_its_own(batch: Batch, depth: int, options: dict[str, Any]) -> None:
    with LLM(batch.folder, device="cpu", depth=depth, block_size=4, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": case.prompt} for case in batch.cases], [case.params for case in batch.cases]
        )
        counters = llm.counters()
    for output, case in zip(outputs, batch.cases, strict=True):
        check(output, case)
    assert counters.used_blocks == 0
    assert (counters.preemptions > 0) == (options["num_blocks"] == 30)
    assert counters.output_tokens == sum(case.num_ids for case in batch.cases), "usage counts no token behind a stop"


@pytest.mark.parametrize(
    "options", [{"num_blocks": 400}, {"num_blocks": 30, "token_budget": 8}], ids=["ample", "tight"]
)
@DEPTHS
def test_c29_streams_say_the_same(batch: Batch, depth: int, options: dict[str, Any]) -> None:
    async def stream(llm: AsyncLLM, case: Case, pause_s: float) -> None:
        before = RequestOutput(request_id="", prompt=None, prompt_token_ids=[])
        async for output in llm.generate({"prompt_token_ids": case.prompt}, case.params):
            completion = output.outputs[0]
            if before.outputs:
                assert completion.text.startswith(before.outputs[0].text)
                assert completion.token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
            assert case.text.startswith(completion.text), "what was streamed is never taken back"
            before = output
            await asyncio.sleep(pause_s)
        assert before.finished
        check(before, case)

    async def main() -> None:
        async with AsyncLLM(batch.folder, device="cpu", depth=depth, block_size=4, **options) as llm:
            # Some consumers are slow, so that updates merge.
            await asyncio.gather(*(stream(llm, case, 0.005 * (index % 3)) for index, case in enumerate(batch.cases)))
            assert llm.counters().used_blocks == 0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain("A", *"hi", BYTE_IM_END, *"more", BYTE_EOS, "S"),
        chain(">", *SMILE.encode(), "x", *"，".encode(), "y", "\n", "z", BYTE_EOS),
        rows_of(S={"S": 5.0}),
    )


@pytest.fixture(scope="module", params=[1, 2, 3])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, **CPU, depth=request.param, block_size=1) as made:
        yield made


def last_output(folder: Path, prompt: str, params: SamplingParams, *, depth: int = 2) -> RequestOutput:
    async def main() -> RequestOutput:
        shown = ""
        async with AsyncLLM(folder, **CPU, depth=depth) as llm:
            async for output in llm.generate(prompt, params):
                assert output.outputs[0].text.startswith(shown)
                shown = output.outputs[0].text
        return output

    return asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    ("stop", "text"),
    [(SMILE, ""), ("，", SMILE + "x"), (SMILE + "x", ""), (["y", "，y", "z"], SMILE + "x"), ("\n", SMILE + "x，y")],
)
def test_c29_stops_of_several_bytes(llm: LLM, stop: Any, text: str) -> None:
    [output] = llm.generate(">", replace(GREEDY, stop=stop))
    assert output.outputs[0].text == text
    assert output.outputs[0].finish_reason == "stop"
    [also] = llm.generate(">", replace(GREEDY, stop=stop, include_stop_str_in_output=True))
    assert also.outputs[0].text == text + str(output.outputs[0].stop_reason)
    assert also.outputs[0].token_ids == output.outputs[0].token_ids == [*also.outputs[0].text.encode()]


def test_c29_the_prompt_does_not_count(llm: LLM) -> None:
    [output] = llm.generate("hiA", replace(GREEDY, stop=["hiA", "Ah"], max_tokens=2))
    assert output.outputs[0].text == "hi"
    assert output.outputs[0].finish_reason == "length"


def test_c07_a_stop_string_costs_at_most_the_steps_in_flight(llm: LLM) -> None:
    for stop, num_ids in (("hi", 2), ("mor", 6)):
        before = llm.counters()
        [output] = llm.generate({"prompt": "A", "cache_salt": stop}, replace(GREEDY, stop=stop))
        after = llm.counters()
        assert len(output.outputs[0].token_ids) == num_ids
        assert after.output_tokens - before.output_tokens == num_ids
        assert num_ids <= after.steps - before.steps <= num_ids + llm.config.depth - 1
        # The cache knows what stands before the last token, and nothing of what ran past it.
        ids = [ord("A"), *b"hi", BYTE_IM_END, *b"more"]
        longer = {"prompt_token_ids": [*ids, 0, 0], "cache_salt": stop}
        [again] = llm.generate(longer, SamplingParams(temperature=0, max_tokens=1))
        assert again.num_cached_tokens == num_ids
    [last] = llm.generate("A", replace(GREEDY, stop="hi", max_tokens=2))
    assert last.outputs[0].finish_reason == "stop", "on the very last token"
    [cut_off] = llm.generate("A", replace(GREEDY, stop="hix", max_tokens=2))
    assert (cut_off.outputs[0].text, cut_off.outputs[0].finish_reason) == ("hi", "length"), "held text comes at the end"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("how", ["text", "id", "eos"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c34_an_end_by_a_special_token(
    folder: Path, tmp_path: Path, how: str, skip: bool, streams: bool, depth: int
) -> None:
    params = replace(GREEDY, skip_special_tokens=skip, max_tokens=12)
    reason: str | int | None = None
    if how == "text":
        params, reason = replace(params, stop=["<|im_end|>"]), "<|im_end|>"
    elif how == "id":
        params, reason = replace(params, stop_token_ids=[BYTE_IM_END]), BYTE_IM_END
    else:
        folder = table_checkpoint(tmp_path, chain("A", *"hi", BYTE_IM_END, "m", "m"), eos_token_id=BYTE_IM_END)
    if streams:
        output = last_output(folder, "A", params, depth=depth)
    else:
        with LLM(folder, **CPU, depth=depth) as llm:
            [output] = llm.generate("A", params)
    [completion] = output.outputs
    assert completion.text == "hi"
    assert completion.token_ids == [*b"hi", BYTE_IM_END]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", reason)


def test_c34_past_eos_stops_still_end(llm: LLM) -> None:
    mark = "hi<|im_end|>more</s>"
    past = replace(GREEDY, ignore_eos=True, max_tokens=20, skip_special_tokens=False)
    assert llm.generate("A", past)[0].outputs[0].text.startswith(mark + "SSS")
    [output] = llm.generate("A", replace(past, stop="SS"))
    assert output.outputs[0].text == mark
    [shown] = llm.generate("A", replace(past, stop="SS", skip_special_tokens=True))
    assert shown.outputs[0].text == "himore"
    assert shown.outputs[0].token_ids == output.outputs[0].token_ids
    [end] = llm.generate("A", replace(past, stop="</s>", skip_special_tokens=True))
    assert (end.outputs[0].text, end.outputs[0].stop_reason) == ("himore", "</s>")


def test_c37_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=20, stop="SS")
    for least, count in ((0, 2), (2, 2), (7, 7)):
        [output] = llm.generate("S", replace(endless, min_tokens=least))
        assert output.outputs[0].token_ids == [ord("S")] * count
        assert output.outputs[0].text == "S" * (count - 2)
    [early] = llm.generate("A", replace(GREEDY, stop=["hi", "or"], min_tokens=4))
    assert early.outputs[0].text == "him"


def test_an_abort_gives_out_held_text(folder: Path) -> None:
    async def main() -> RequestOutput:
        async with AsyncLLM(folder, **CPU) as llm:
            stream = llm.generate("S", replace(GREEDY, stop="SSSSSSSSx", max_tokens=None))
            async for output in stream:
                if len(output.outputs[0].token_ids) > 10:
                    assert output.outputs[0].text == "S" * (len(output.outputs[0].token_ids) - 8)
                    break
            closing = asyncio.create_task(llm.aclose())
            rest = [output async for output in stream]
            await closing
        return rest[-1]

    output = asyncio.run(asyncio.wait_for(main(), 30))
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "S" * len(output.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "^stop='' is empty"),
        (["a", ""], "^stop='' is empty"),
        ([7], "^stop=7 must be a string"),
        (b"a", "^stop=b'a' must be a string or a list"),
        (5, "^stop=5 must be"),
        (["a"] * 17, "^stop has 17 strings; at most 16"),
        ("a" * 4097, "^stop has a string of 4097 characters; the limit is 4096"),
        ("a\ud83d", "^stop='a.ud83d' holds half of a surrogate pair"),
    ],
)
def test_c29_stops_that_are_refused(stop: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(stop=stop)


def test_c29_no_stops() -> None:
    assert SamplingParams(stop=[]).stops == SamplingParams(stop=None).stops == SamplingParams().stops == ()
    assert SamplingParams(stop=["b", "a", "b"]).stops == ("b", "a")
    assert len(SamplingParams(stop=[str(number) for number in range(16)]).stops) == 16
    with pytest.raises(RequestError, match="detokenize=False asks for none"):
        SamplingParams(stop="a", detokenize=False)


@DEPTHS
def test_c29_log_probs_end_with_the_ids(batch: Batch, depth: int) -> None:
    prompts = [{"prompt_token_ids": case.prompt} for case in batch.cases]
    with LLM(batch.folder, device="cpu", depth=depth, block_size=4, num_blocks=400) as llm:
        whole = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1))
        outputs = llm.generate(prompts, [replace(case.params, logprobs=1) for case in batch.cases])
    for output, without, case in zip(outputs, whole, batch.cases, strict=True):
        check(output, case)
        found, expected = output.outputs[0].logprobs, without.outputs[0].logprobs
        assert found is not None
        assert expected is not None
        assert [list(each) for each in found] == [list(each) for each in expected[: case.num_ids]]
        assert [each[i].logprob for each, i in zip(found, case.ids, strict=True)] == pytest.approx(
            [each[i].logprob for each, i in zip(expected, case.ids, strict=False)], abs=1e-4
        )


@DEPTHS
def test_c29_text_that_is_known_late(tmp_path: Path, depth: int) -> None:
    """A byte-fallback tokenizer makes a character of its bytes only when the token after them is known."""
    euro = spm_bytes("€".encode())
    size = -(-len(spm_vocabulary()) // 8) * 8
    folder = table_checkpoint(
        tmp_path, chain(spm_id("a"), *euro, spm_id("b"), spm_id("b")), vocab_size=size, tokenizer=False, eos_token_id=2
    )
    save_spm_tokenizer(folder)
    prompt = {"prompt_token_ids": [spm_id("a")]}
    params = replace(GREEDY, stop="€")

    async def stream() -> None:
        seen = []
        async with AsyncLLM(folder, **CPU, depth=depth) as llm:
            async for output in llm.generate(prompt, params):
                seen.append(output.outputs[0].token_ids)
        assert seen[-1] == euro
        assert all(ids == euro[: len(ids)] for ids in seen)

    with LLM(folder, **CPU, depth=depth, block_size=1) as llm:
        [output] = llm.generate(prompt, params)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", euro)
        assert output.outputs[0].stop_reason == "€"
        [longer] = llm.generate({"prompt_token_ids": [spm_id("a"), *euro, spm_id("b"), 5]}, params)
        assert longer.num_cached_tokens == 3, "nothing behind the stop was cached, and neither was its last token"
        [last] = llm.generate(prompt, replace(params, max_tokens=3))
        assert (last.outputs[0].text, last.outputs[0].finish_reason) == ("", "stop"), "found when nothing else comes"
        [other] = llm.generate(prompt, replace(params, stop="b"))
        assert (other.outputs[0].text, other.outputs[0].token_ids) == ("€", [*euro, spm_id("b")])
    asyncio.run(asyncio.wait_for(stream(), 30))
