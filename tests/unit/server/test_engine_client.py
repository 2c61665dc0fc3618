"""Requests through the engine process: they come in crowds, are refused, are left, and leave nothing behind."""

import asyncio
import gc
import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from fixtures.engine_clients import ClientInLoop, answer, eventually, is_idle, until
from fixtures.served_models import GREEDY, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, CHATML
from gapless import EngineConfig, SamplingParams
from gapless.errors import EngineDeadError, QueueFullError, RequestError
from gapless.server.engine_client import ServedModelClient
from gapless.server.generation import ChoiceDelta, Generation

NUM_BLOCKS = 256
CONFIG = EngineConfig(device="cpu", num_blocks=NUM_BLOCKS, max_rows=16, timeline=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain(*"abcde", BYTE_EOS),
        chain(*"vwxyz", BYTE_EOS),
        rows(S={"S": 5.0}),
        chain("\n", *"ok", BYTE_EOS),
        max_position_embeddings=4096,
        chat_template=CHATML,
    )


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[ClientInLoop]:
    with ClientInLoop(folder, CONFIG, served_model_names=["table", "alias"]) as made:
        yield made


def test_what_the_model_is(served: ClientInLoop, folder: Path) -> None:
    client = served.client
    assert (client.model_name, client.served_model_names) == ("table", ("table", "alias"))
    assert (client.vocab_size, client.max_model_len, client.kv_capacity) == (320, 4096, NUM_BLOCKS * 16)
    assert client.eos_token_ids == {BYTE_EOS}
    assert (client.device, client.dtype) == ("cpu", "float32")
    assert client.alive
    assert not client.died.is_set()
    assert client.error is None
    assert client.load_s > 0
    assert client.tokenizer.encode("ab") == [97, 98]


def test_a_chat(served: ClientInLoop) -> None:
    async def chat() -> str:
        prompt = await served.client.prepare_chat([{"role": "user", "content": "hi"}])
        assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        async with await served.client.submit(prompt, GREEDY) as generation:
            return (await generation.result()).outputs[0].text

    assert served.run(chat()) == "ok"
    with pytest.raises(RequestError, match=r"messages\[0\]"):
        served.run(served.client.prepare_chat([{"role": "nobody", "content": "hi"}]))


def test_a_long_prompt_is_prepared_beside_the_loop(served: ClientInLoop) -> None:
    async def both() -> int:
        prompt = asyncio.create_task(served.client.prepare_prompt("a" * 3_000_000))
        turns = 0
        while not prompt.done():
            await asyncio.sleep(0)
            turns += 1
        assert len((await prompt).token_ids) == 3_000_000
        return turns

    assert served.run(both()) > 1


def test_c05_it_works_after_being_idle_and_streams_end(served: ClientInLoop) -> None:
    async def everything() -> None:
        await asyncio.sleep(0.5)
        noise = asyncio.create_task(answer(served.client, "S", ENDLESS))
        async with asyncio.timeout(20):
            outputs = await asyncio.gather(*(answer(served.client, "av"[index % 2], GREEDY) for index in range(20)))
        assert [output.outputs[0].text for output in outputs] == ["bcde", "wxyz"] * 10
        noise.cancel()
        await until(served.client, is_idle)

    served.run(everything())


def test_c08_every_request_is_one_of_its_own(served: ClientInLoop) -> None:
    async def everything() -> None:
        before = await until(served.client, is_idle)
        total = before.free_blocks + before.cached_blocks
        seen = set()
        for _ in range(50):
            first, second = await asyncio.gather(answer(served.client, "a", GREEDY), answer(served.client, "v", GREEDY))
            assert (first.outputs[0].text, second.outputs[0].text) == ("bcde", "wxyz")
            seen |= {first.request_id, second.request_id}
        assert len(seen) == 100
        after = await until(served.client, is_idle)
        assert after.free_blocks + after.cached_blocks == total

    served.run(everything())


# --- left ---------------------------------------------------------------------------------------------------------


async def _leave_the_block(client: ServedModelClient, params: SamplingParams) -> None:
    async with await client.submit(await client.prepare_prompt("S"), params) as generation:
        await anext(generation)


async def _close(client: ServedModelClient, params: SamplingParams) -> None:
    generation = await client.submit(await client.prepare_prompt("S"), params)
    await anext(generation)
    await generation.aclose()
    rest = [delta for deltas in [each async for each in generation] for delta in deltas]
    assert {delta.finish_reason for delta in rest} == {"abort"}
    assert len(rest) == params.n


async def _drop(client: ServedModelClient, params: SamplingParams) -> None:
    await anext(await client.submit(await client.prepare_prompt("S"), params))


async def _cancel_while_waiting(client: ServedModelClient, params: SamplingParams) -> None:
    task = asyncio.create_task(answer(client, "S", params))
    await until(client, lambda stats: stats.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_while_busy(client: ServedModelClient, params: SamplingParams) -> None:
    async def consume() -> None:
        async with await client.submit(await client.prepare_prompt("S"), params) as generation:
            async for _ in generation:
                await asyncio.sleep(60)

    task = asyncio.create_task(consume())
    await until(client, lambda stats: stats.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _cancel_the_submit(client: ServedModelClient, params: SamplingParams) -> None:
    prompt = await client.prepare_prompt("S")
    task = asyncio.create_task(client.submit(prompt, params))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _leave_during_prefill(client: ServedModelClient, params: SamplingParams) -> None:
    async with await client.submit(await client.prepare_prompt("S" * 3000), params):
        pass


LEAVES = [
    _leave_the_block,
    _close,
    _drop,
    _cancel_while_waiting,
    _cancel_while_busy,
    _cancel_the_submit,
    _leave_during_prefill,
]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("leave", LEAVES, ids=lambda leave: leave.__name__.strip("_"))
def test_c54_leaving_a_request_ends_it(served: ClientInLoop, leave: Any, n: int) -> None:
    async def everything() -> None:
        for _ in range(5):
            aborted = (await until(served.client, is_idle)).aborted + n
            await leave(served.client, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, n=n))
            after = await until(served.client, lambda stats, to=aborted: is_idle(stats) and stats.aborted == to)
            assert after.free_blocks + after.cached_blocks == NUM_BLOCKS
            assert served.client.num_live == 0
        whole = await answer(served.client, [ord("S")] * 4000, SamplingParams(temperature=0, max_tokens=90))
        assert whole.outputs[0].text == "S" * 90, "every block is there"

    served.run(everything())


def test_c54_a_left_request_takes_part_in_two_more_steps_at_most(served: ClientInLoop) -> None:
    async def everything() -> None:
        generation = await served.client.submit(await served.client.prepare_prompt("S"), ENDLESS)
        await anext(generation)
        generation.abort()
        at_most = (await served.client.counters()).steps + 2  # asked for after the abort, so answered after it
        await until(served.client, is_idle)
        assert (await served.client.counters()).steps <= at_most

    served.run(everything())


def test_c54_a_queued_request_that_is_left_never_runs(folder: Path) -> None:
    async def everything() -> None:
        client = one_row.client
        running = asyncio.create_task(answer(client, "S", ENDLESS))
        await until(client, lambda stats: stats.running == 1)
        queued = [asyncio.create_task(answer(client, "a" * 1000, GREEDY)) for _ in range(3)]
        await until(client, lambda stats: stats.waiting == 3)
        for task in queued:
            task.cancel()
        await until(client, lambda stats: stats.waiting == 0)
        assert (await client.counters()).aborted == 3
        running.cancel()
        stats = await until(client, is_idle)
        assert stats.cached_blocks * 16 <= stats.output_tokens + 1, "nothing of theirs was computed"
        assert (await answer(client, "a", GREEDY)).outputs[0].text == "bcde"

    with ClientInLoop(folder, EngineConfig(device="cpu", num_blocks=NUM_BLOCKS, max_rows=1)) as one_row:
        one_row.run(everything())


# --- crowds -------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_and_recovers(folder: Path) -> None:
    async def everything() -> None:
        client = small.client
        tasks = [asyncio.create_task(answer(client, "S", ENDLESS)) for _ in range(12)]
        refused = await eventually_done(tasks, 12 - 1 - 4)
        assert all(isinstance(task.exception(), QueueFullError) for task in refused)
        assert "max_waiting=4" in str(refused[0].exception())
        for task in set(tasks) - set(refused):
            task.cancel()
        await until(client, is_idle)
        assert (await answer(client, "a", GREEDY)).outputs[0].text == "bcde"

    config = EngineConfig(device="cpu", num_blocks=NUM_BLOCKS, max_rows=1, max_waiting=4)
    with ClientInLoop(folder, config) as small:
        small.run(everything())


async def eventually_done(tasks: list["asyncio.Task[Any]"], at_least: int) -> list["asyncio.Task[Any]"]:
    await eventually(lambda: sum(task.done() for task in tasks) >= at_least, 10.0)
    return [task for task in tasks if task.done()]


def _own_kilobytes(process: psutil.Process) -> int:
    """Memory that only this process has: RssAnon and VmSwap."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    values = {name: value for name, _, value in (line.partition(":") for line in lines)}
    return sum(int(values[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def test_c63_crowds_leave_nothing_behind(served: ClientInLoop) -> None:
    processes = psutil.Process(), psutil.Process(served.client.engine_pid)

    async def crowd(size: int, unique: str) -> None:
        async def one(index: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
            prompt = await served.client.prepare_prompt(f"{unique} {index} S")
            async with await served.client.submit(prompt, params) as generation:
                if index % 10 == 9:
                    return
                output = await generation.result()
            assert output.outputs[0].text == "S" * 8
            assert len(output.outputs[0].logprobs or ()) == 8

        await asyncio.gather(*(one(index) for index in range(size)))
        await until(served.client, is_idle)

    def come_and_go(unique: str) -> None:
        served.run(crowd(500, unique))
        # Each time: in a process as large as that of many tests the collector itself runs rarely, and garbage heaps up.
        gc.collect()

    come_and_go("warm-up")
    before = [(process.num_fds(), process.num_threads()) for process in processes]
    sizes = [[_own_kilobytes(process) for process in processes]]
    for round_ in range(3):
        come_and_go(f"round {round_}")
        sizes.append([_own_kilobytes(process) for process in processes])
    assert not [each for each in gc.get_objects() if type(each) in (Generation, ChoiceDelta)]
    assert served.client.num_live == 0
    for process, (fds, threads) in zip(processes, before, strict=True):
        assert process.num_fds() <= fds
        assert process.num_threads() <= threads
    # What is left behind is so by every crowd: memory that one of them did not need more of is the allocator's affair.
    # On a CPU the engine's matrix products keep a prepared kernel for every new shape, up to some hundred MB.
    for sizes_of_one, grown in zip(zip(*sizes, strict=True), (1_700, 21_000), strict=True):
        assert min(after - before for before, after in pairwise(sizes_of_one)) < grown


def test_counts_and_the_timeline_are_told(served: ClientInLoop) -> None:
    served.run(answer(served.client, "a", GREEDY))
    stats = served.run(until(served.client, is_idle))
    assert stats.free_blocks + stats.cached_blocks == NUM_BLOCKS
    assert stats.steps > 0
    assert 0 < stats.device_busy_s <= stats.device_window_s
    timeline = stats.timeline
    assert timeline is not None
    assert timeline.num_steps > 0
    assert timeline.busy_s + sum(timeline.idle_s.values()) == pytest.approx(timeline.window_s)
    assert {"schedule", "apply", "launch"} <= timeline.idle_s.keys()
    assert timeline.read_bytes_per_s is None, "measured on a GPU only"


# --- the end ------------------------------------------------------------------------------------------------------


def test_draining_waits_and_then_aborts(folder: Path) -> None:
    async def everything() -> None:
        client = fresh.client
        short = asyncio.create_task(answer(client, "a", GREEDY))
        await eventually(lambda: client.num_live or short.done(), 5.0)
        await client.drain(10.0)
        assert (await short).outputs[0].text == "bcde"
        endless = [asyncio.create_task(answer(client, "S", ENDLESS)) for _ in range(3)]
        await until(client, lambda stats: stats.running == 3)
        await client.drain(0.1)
        for output in await asyncio.gather(*endless):
            assert output.outputs[0].finish_reason == "abort"
            assert output.outputs[0].text
        assert client.alive

    with ClientInLoop(folder, CONFIG) as fresh:
        fresh.run(everything())


def test_closing_ends_what_runs_and_refuses_what_comes(folder: Path) -> None:
    async def everything() -> None:
        client = fresh.client
        tasks = [asyncio.create_task(answer(client, "S", ENDLESS)) for _ in range(3)]
        await until(client, lambda stats: stats.running == 3)
        await asyncio.gather(client.close(), client.close())
        for task in tasks:
            assert (await task).outputs[0].finish_reason == "abort"
        assert not client.alive
        assert client.died.is_set()
        with pytest.raises(EngineDeadError, match="shut down"):
            await answer(client, "a", GREEDY)
        await client.close()

    with ClientInLoop(folder, CONFIG) as fresh:
        fresh.run(everything())


def test_the_engines_log_lines_are_this_processs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gapless"), ClientInLoop(folder, CONFIG):
        assert any(record.message.startswith("KV cache: 4096 tokens") for record in caplog.records)


def test_stages_of_loading_are_told(folder: Path) -> None:
    class Told:
        def __init__(self) -> None:
            self.stages: list[str] = []
            self.bytes: list[tuple[int, int]] = []

        def stage(self, name: str) -> None:
            self.stages.append(name)

        def advance(self, bytes_done: int, bytes_total: int) -> None:
            self.bytes.append((bytes_done, bytes_total))

    told = Told()
    with ClientInLoop(folder, CONFIG, progress=told):
        assert told.stages[0] == "open checkpoint"
        assert told.stages[-1] == "load tokenizer"
        done, total = told.bytes[-1]
        assert done == total > 0


def test_it_works_in_uvloop(folder: Path) -> None:
    async def everything() -> None:
        async with await ServedModelClient.start(folder, CONFIG) as client:
            outputs = await asyncio.gather(*(answer(client, "a", GREEDY) for _ in range(20)))
            assert {output.outputs[0].text for output in outputs} == {"bcde"}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(everything())
