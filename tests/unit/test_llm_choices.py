"""``n`` choices in ``LLM`` and ``AsyncLLM``: seeds, shared prompts, ends of their own."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.served_models import CPU, chain, hist_checkpoint, random_prompts, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, BYTE_IM_END
from gapless import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from gapless.errors import RequestError

FLAT = {chr(token): 1.0 for token in range(0x20, 0x7F)}
FOUR = SamplingParams(n=4, seed=7, max_tokens=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every printable character is as likely as any other, at every position."""
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        {ord(token): {ord(after): 1.0 for after in FLAT} for token in FLAT},
        chain("\n", "\t", BYTE_EOS),
        nan_tokens=[BYTE_IM_END],
    )


@pytest.fixture(scope="module", params=[1, 2, 3])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(folder, **CPU, depth=request.param) as made:
        yield made


def ids_of(output: RequestOutput) -> list[list[int]]:
    assert [choice.index for choice in output.outputs] == list(range(len(output.outputs)))
    return [choice.token_ids for choice in output.outputs]


def test_c23_choices_differ_and_come_again(llm: LLM) -> None:
    [output] = llm.generate("a", FOUR)
    choices = ids_of(output)
    assert len({tuple(ids) for ids in choices}) == 4
    for ids in choices:
        assert len(ids) == 32
        assert len(set(ids)) > 10, "a draw of its own for each token"
    [again] = llm.generate("a", FOUR)
    assert ids_of(again) == choices
    assert ids_of(llm.generate(["a"], [FOUR])[0]) == choices
    assert ids_of(llm.generate("a", replace(FOUR, n=1))[0]) == choices[:1], "the first choice is that of n=1"
    assert ids_of(llm.generate("a", replace(FOUR, n=2))[0]) == choices[:2]


def test_c23_choices_of_different_seeds_have_nothing_in_common(llm: LLM) -> None:
    seeded = [llm.generate("a", replace(FOUR, seed=seed))[0] for seed in range(5)]
    assert len({tuple(ids) for output in seeded for ids in ids_of(output)}) == 20


def test_c23_a_seed_in_one_object_is_that_of_every_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b", "a"], FOUR)
    assert ids_of(outputs[0]) == ids_of(outputs[1]) == ids_of(outputs[2])
    apart = llm.generate(["a", "a"], [replace(FOUR, seed=seed) for seed in (1, 2)])
    assert ids_of(apart[0]) != ids_of(apart[1])


def test_c23_without_a_seed_everything_differs(llm: LLM, folder: Path) -> None:
    fresh = replace(FOUR, seed=None)
    outputs = llm.generate(["a", "a"], fresh) + llm.generate("a", fresh)
    with LLM(folder, **CPU) as restarted:
        outputs += restarted.generate("a", fresh)
    assert len({tuple(ids) for output in outputs for ids in ids_of(output)}) == 16


def test_c23_a_choice_does_not_feel_how_others_end(llm: LLM) -> None:
    whole = llm.generate("a", FOUR)[0].outputs
    stop = whole[1].text[3]
    [cut] = llm.generate("a", replace(FOUR, stop=stop))
    assert cut.outputs[1].finish_reason == "stop"
    for before, after in zip(whole, cut.outputs, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.token_ids == before.token_ids[: len(after.text) + (stop in before.text)]
        assert after.finish_reason == ("stop" if stop in before.text else "length")


@pytest.mark.parametrize(
    "options", [{"num_blocks": 400}, {"num_blocks": 24, "token_budget": 8}], ids=["ample", "tight"]
)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_c23_choices_under_preemption(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, int], depth: int, prefix_caching: bool
) -> None:
    folder, _ = hist_checkpoint(tmp_path_factory.mktemp("hist"))
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts([5, 13, 21])]
    params = SamplingParams(n=3, temperature=0.7, seed=3, max_tokens=20)
    with LLM(folder, device="cpu", num_blocks=400, block_size=4) as llm:
        wanted = [ids_of(output) for output in llm.generate(prompts, params)]
    with LLM(folder, device="cpu", depth=depth, block_size=4, enable_prefix_caching=prefix_caching, **options) as llm:
        outputs = llm.generate(prompts, params)
        counters = llm.counters()
    assert [ids_of(output) for output in outputs] == wanted
    assert counters.used_blocks == 0
    assert (counters.preemptions > 0) == (options["num_blocks"] == 24)
    assert counters.output_tokens == sum(len(ids) for choices in wanted for ids in choices)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt["prompt_token_ids"]
        assert output.num_cached_tokens == 0, "that further choices find the prompt is nobody's hit"
        assert output.metrics is not None
        assert output.metrics.finished_s is not None


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_blocks_of_a_prompt_are_shared_whatever_the_prefix_cache(folder: Path, prefix_caching: bool) -> None:
    prompt = [*itertools.islice(itertools.cycle(b"abcdefg"), 65)]
    # 16 blocks for the prompt and 2 for each choice; apart they would need 18 each.
    with LLM(folder, device="cpu", num_blocks=30, block_size=4, enable_prefix_caching=prefix_caching) as llm:
        [output] = llm.generate({"prompt_token_ids": prompt}, SamplingParams(n=6, max_tokens=4))
        counters = llm.counters()
    assert all(choice.finish_reason == "length" for choice in output.outputs)
    assert (counters.steps, counters.preemptions) == (4, 0), "all six ran together, from the prompt's step on"


def test_a_failing_choice_fails_alone(folder: Path, tmp_path: Path) -> None:
    # Half of the choices go on to a token after which nothing is finite.
    folder = table_checkpoint(tmp_path, rows(A={"b": 1.0, "N": 1.0}), chain("b", "c", BYTE_EOS), nan_tokens=[ord("N")])
    with LLM(folder, **CPU) as llm:
        [output] = llm.generate("A", SamplingParams(n=40, seed=1, max_tokens=8))
        assert llm.counters().used_blocks == 0
    assert output.finished
    assert {(choice.text, choice.finish_reason) for choice in output.outputs} == {("bc", "stop"), ("N", "error")}


def run_streams(folder: Path, params: SamplingParams, prompt: str = "a") -> list[RequestOutput]:
    async def main() -> list[RequestOutput]:
        async with AsyncLLM(folder, **CPU) as llm:
            return [output async for output in llm.generate(prompt, params, "mine")]

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_streams_of_several_choices(folder: Path) -> None:
    with LLM(folder, **CPU) as llm:
        [whole] = llm.generate("a", replace(FOUR, stop="Z"))
    outputs = run_streams(folder, replace(FOUR, stop="Z"))
    shown = ["" for _ in range(4)]
    for output in outputs:
        assert output.request_id == "mine"
        assert output.finished == all(choice.finish_reason for choice in output.outputs)
        for choice in output.outputs:
            assert choice.text.startswith(shown[choice.index])
            shown[choice.index] = choice.text
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert ids_of(outputs[-1]) == ids_of(whole)
    assert [choice.text for choice in outputs[-1].outputs] == [choice.text for choice in whole.outputs]
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.finished_s is not None


def test_leaving_a_stream_aborts_all_choices(folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(folder, device="cpu", num_blocks=256, max_rows=2) as llm:
            async for _ in llm.generate("a", replace(FOUR, n=5, max_tokens=None)):
                break
            deadline_s = time.monotonic() + 5
            while llm.counters().aborted < 5:
                assert time.monotonic() < deadline_s
                await asyncio.sleep(0.01)
            counters = llm.counters()
            assert counters.used_blocks == counters.running == counters.waiting == 0

    asyncio.run(asyncio.wait_for(main(), 30))


def test_greedy_choices_are_equal(llm: LLM) -> None:
    [output] = llm.generate("\n", SamplingParams(n=3, temperature=0, max_tokens=8))
    wanted = CompletionOutput(index=0, text="\t", token_ids=[ord("\t"), BYTE_EOS], finish_reason="stop")
    assert output.outputs == [replace(wanted, index=index) for index in range(3)]


@pytest.mark.parametrize("n", [0, -1, 1025, True, 1.0, "2"])
def test_numbers_of_choices_that_are_refused(n: int) -> None:
    with pytest.raises(RequestError, match=r"^n="):
        SamplingParams(n=n)
