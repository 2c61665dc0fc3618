"""``AsyncLLM``: streams that grow, end, are left, and never wait for each other."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.checkpoints import f_table_model, save
from fixtures.served_models import CPU, GREEDY, NEVER, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, CHATML, save_spm_tokenizer, spm_id, spm_vocabulary
from gapless import AsyncLLM, RequestOutput, SamplingParams
from gapless.errors import EngineDeadError, RequestError
from gapless.model.decoder import DecoderModel

ENDLESS = SamplingParams(temperature=0, max_tokens=None)
EMOJI = "\U0001f600".encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain(*"abcde", BYTE_EOS),
        chain(*"vwxyz", BYTE_EOS),
        chain(">", *EMOJI, "A", "B", BYTE_EOS),
        rows(S={"S": 5.0}),
        chain("\n", *"ok", BYTE_EOS),
        nan_tokens=[ord("N")],
        max_position_embeddings=4096,
        chat_template=CHATML,
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[AsyncLLM]:
    made = AsyncLLM(folder, **CPU)  # outside of any event loop
    yield made
    made.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def wait_until(holds: Callable[[], object], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.002)


def idle(llm: AsyncLLM) -> bool:
    counters = llm.counters()
    return counters.used_blocks == counters.running == counters.waiting == 0


def test_outputs_grow_to_the_final_one(llm: AsyncLLM) -> None:
    outputs = run(collect(llm.generate("a", GREEDY, "mine")))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == "bcde"
    assert outputs[-1].outputs[0].token_ids == [*b"bcde", BYTE_EOS]
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert all(output.outputs[0].finish_reason is None for output in outputs[:-1])
    assert {output.request_id for output in outputs} == {"mine"}
    assert [*b"bcde", BYTE_EOS][: len(outputs[0].outputs[0].token_ids)] == outputs[0].outputs[0].token_ids, "a snapshot"


def test_chat_streams(llm: AsyncLLM) -> None:
    outputs = run(collect(llm.chat([{"role": "user", "content": "hi"}], GREEDY)))
    assert outputs[-1].outputs[0].text == "ok"
    assert outputs[-1].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "options"), [("", {}), ([320], {}), ("a" * 5000, {}), (["a", "b"], {}), ("a", {"request_id": 7})]
)
def test_a_bad_request_is_refused_at_the_first_step(llm: AsyncLLM, prompt: Any, options: Any) -> None:
    with pytest.raises(RequestError):
        run(collect(llm.generate(prompt, GREEDY, **options)))
    assert run(collect(llm.generate("a", GREEDY)))[-1].outputs[0].text == "bcde"


def test_c05_streams_end_after_the_last_item_whatever_others_do(llm: AsyncLLM) -> None:
    async def one(index: int) -> str:
        async with asyncio.timeout(5):
            outputs = await collect(llm.generate("av"[index % 2], GREEDY))
        assert sum(output.finished for output in outputs) == 1
        return outputs[-1].outputs[0].text

    async def everything() -> None:
        noise = asyncio.create_task(collect(llm.generate("S", ENDLESS)))
        texts = await asyncio.gather(*(one(index) for index in range(20)))
        assert texts == ["bcde", "wxyz"] * 10
        noise.cancel()

    run(everything())


def test_c05_time_outs_are_kept_whatever_others_do(llm: AsyncLLM) -> None:
    async def everything() -> None:
        async def impatient(limit_s: float) -> float:
            began_s = time.perf_counter()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(collect(llm.generate("S", ENDLESS)), limit_s)
            return time.perf_counter() - began_s - limit_s

        late = await asyncio.gather(*(impatient(0.2 + 0.05 * index) for index in range(8)))
        assert max(late) < 0.2
        await wait_until(lambda: idle(llm))

    run(everything())


def test_c05_a_dead_engine_ends_every_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecoderModel.forward
    broken = threading.Event()

    def breaks(self: DecoderModel, *arguments: Any) -> Any:
        if broken.is_set():
            raise ArithmeticError("a made-up fault")
        return forward(self, *arguments)

    monkeypatch.setattr(DecoderModel, "forward", breaks)

    async def everything() -> None:
        async with AsyncLLM(folder, **CPU) as llm:
            waiters = [asyncio.create_task(collect(llm.generate("S", ENDLESS))) for _ in range(5)]
            await wait_until(lambda: llm.counters().running)
            broken.set()
            errors = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 1.0)
            with pytest.raises(EngineDeadError, match="a made-up fault") as newcomer:
                await collect(llm.generate("a", GREEDY))
        for error in [*errors, newcomer.value]:
            assert isinstance(error, EngineDeadError)
            assert isinstance(error.__cause__, ArithmeticError)

    run(everything())


def test_c08_equal_ids_are_requests_of_their_own(llm: AsyncLLM) -> None:
    async def everything() -> None:
        before = llm.counters()
        total = before.free_blocks + before.cached_blocks
        for _ in range(100):
            first, second = await asyncio.gather(
                collect(llm.generate("a", GREEDY, "same")), collect(llm.generate("v", GREEDY, "same"))
            )
            assert first[-1].outputs[0].text == "bcde"
            assert second[-1].outputs[0].text == "wxyz"
            assert first[-1].request_id == second[-1].request_id == "same"
        after = llm.counters()
        assert after.free_blocks + after.cached_blocks == total
        huge = await collect(llm.generate("a", GREEDY, "x" * 1_000_000))
        assert len(huge[-1].request_id) == 256
        unnamed = [(await collect(llm.generate("a", GREEDY)))[-1].request_id for _ in range(2)]
        assert len(set(unnamed)) == 2

    run(everything())


async def _break(stream: Any, started: Callable[[], Awaitable[None]]) -> None:
    async for _ in stream:
        break


async def _aclose(stream: Any, started: Callable[[], Awaitable[None]]) -> None:
    await anext(stream)
    await stream.aclose()


async def _drop(stream: Any, started: Callable[[], Awaitable[None]]) -> None:
    await anext(stream)


async def _cancel_while_waiting(stream: Any, started: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.create_task(collect(stream))
    del stream
    await started()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_while_busy(stream: Any, started: Callable[[], Awaitable[None]]) -> None:
    async def consume() -> None:
        async for _ in stream:
            await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await started()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("leave", [_break, _aclose, _drop, _cancel_while_waiting, _cancel_while_busy])
def test_c54_leaving_a_stream_aborts_its_request(llm: AsyncLLM, leave: Any) -> None:
    async def everything() -> None:
        for _ in range(10):
            aborted = llm.counters().aborted
            # The generator is only referred to by the one who leaves it.
            await leave(llm.generate("S", ENDLESS), lambda: wait_until(lambda: llm.counters().running))
            await wait_until(lambda aborted=aborted: llm.counters().aborted == aborted + 1, 1.0)
            await wait_until(lambda: idle(llm), 1.0)

    run(everything())


def test_c54_a_left_request_takes_part_in_two_more_steps_at_most(llm: AsyncLLM) -> None:
    async def everything() -> None:
        stream = llm.generate("S", ENDLESS)
        await anext(stream)
        await stream.aclose()
        steps = llm.counters().steps
        await wait_until(lambda: idle(llm), 1.0)
        await asyncio.sleep(0.05)
        assert llm.counters().steps - steps <= 2

    run(everything())


def test_c54_a_queued_request_is_never_prefilled(folder: Path) -> None:
    async def everything() -> None:
        async with AsyncLLM(folder, **CPU, max_rows=1) as llm:
            running = asyncio.create_task(collect(llm.generate("S", ENDLESS)))
            await wait_until(lambda: llm.counters().running)
            queued = [asyncio.create_task(collect(llm.generate("a", GREEDY))) for _ in range(3)]
            await wait_until(lambda: llm.counters().waiting == 3)
            for task in queued:
                task.cancel()
            await wait_until(lambda: llm.counters().waiting == 0, 1.0)
            assert llm.counters().aborted == 3
            running.cancel()
            await wait_until(lambda: idle(llm), 1.0)
            assert llm.counters().output_tokens > 0
            assert (await collect(llm.generate("a", GREEDY)))[-1].outputs[0].text == "bcde"

    run(everything())


def test_a_loop_that_was_closed_with_streams_open_holds_nothing_back(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = llm.generate("S", ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()
    run(wait_until(lambda: idle(llm)))
    del stream


def test_closing_ends_open_streams_as_aborted(folder: Path) -> None:
    async def everything() -> None:
        async with AsyncLLM(folder, **CPU) as llm:
            task = asyncio.create_task(collect(llm.generate("S", ENDLESS)))
            await wait_until(lambda: llm.counters().running)
        outputs = await task
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError, match="closed"):
            await collect(llm.generate("a", GREEDY))

    run(everything())


def test_a_failed_request_says_so_in_its_last_output(llm: AsyncLLM) -> None:
    outputs = run(collect(llm.generate("aN", GREEDY)))
    assert outputs[-1].outputs[0].finish_reason == "error"
    assert "not finite" in (outputs[-1].outputs[0].error or "")


def test_c31_characters_of_several_tokens(llm: AsyncLLM) -> None:
    texts = [output.outputs[0].text for output in run(collect(llm.generate(">", GREEDY)))]
    assert texts[-1] == "\U0001f600AB"
    assert all("\ufffd" not in text for text in texts)
    cut = run(collect(llm.generate(">", SamplingParams(temperature=0, max_tokens=3))))
    assert cut[-1].outputs[0].text == llm.tokenizer.decode(EMOJI[:3], skip_special_tokens=True) == "\ufffd"
    assert all(output.outputs[0].text == "" for output in cut[:-1])


def test_c31_a_slow_consumer_misses_nothing(llm: AsyncLLM) -> None:
    async def slow(delay_s: float) -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate("S", SamplingParams(temperature=0, max_tokens=300)):
            outputs.append(output)
            await asyncio.sleep(delay_s)
        return outputs

    async def everything() -> None:
        for outputs in await asyncio.gather(slow(0.05), slow(0.0), slow(0.01)):
            assert outputs[-1].outputs[0].token_ids == [ord("S")] * 300
            assert outputs[-1].outputs[0].text == "S" * 300
        assert len(await slow(0.1)) < 100, "updates merge"

    run(everything())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c31_c33_streams_are_the_tokenizers_text(tmp_path: Path, depth: int) -> None:
    size = -(-len(spm_vocabulary()) // 8) * 8
    script = [spm_id("a"), spm_id("▁"), spm_id("▁cup"), spm_id("▁s"), *(3 + byte for byte in "€".encode()), spm_id("b")]
    table = torch.full((size, size), NEVER)
    for before, after in zip(script, [*script[1:], 2], strict=True):
        table[before, after] = 5.0
    save(f_table_model(table, eos_token_id=2), tmp_path)
    save_spm_tokenizer(tmp_path)

    async def everything() -> None:
        async with AsyncLLM(tmp_path, **CPU, depth=depth) as llm:
            outputs = await collect(llm.generate([script[0]], GREEDY))
            assert outputs[-1].outputs[0].text == " cup s€b"
            assert all("\ufffd" not in output.outputs[0].text for output in outputs)
            for start in range(len(script) - 1):
                outputs = await collect(llm.generate([script[start]], GREEDY))
                ids = outputs[-1].outputs[0].token_ids
                assert outputs[-1].outputs[0].text == llm.tokenizer.decode(ids, skip_special_tokens=True)
                texts = [output.outputs[0].text for output in outputs]
                assert all(texts[-1].startswith(text) for text in texts)

    run(everything())


def test_many_streams_come_and_go(llm: AsyncLLM) -> None:
    chance = random.Random(0)

    async def visitor(index: int) -> None:
        await asyncio.sleep(0.3 * chance.random())
        if index % 3 == 0:
            stream = llm.generate("S", ENDLESS)
            for _ in range(chance.randrange(1, 5)):
                await anext(stream)
            await stream.aclose()
        else:
            assert (await collect(llm.generate("a", GREEDY)))[-1].outputs[0].text == "bcde"

    async def everything() -> None:
        await asyncio.gather(*(visitor(index) for index in range(150)))
        await wait_until(lambda: idle(llm))

    run(everything())
