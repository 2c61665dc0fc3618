"""Two processes that live and die as they should: no orphan, nobody who waits for ever, garbage harms nobody."""

import asyncio
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from e2e.fault_points import Faults
from fixtures.engine_clients import ClientInLoop, answer, ended_within, eventually, is_gone, is_idle, until
from fixtures.served_models import GREEDY, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import EngineConfig, SamplingParams
from gapless.errors import CheckpointError, ConfigError, EngineDeadError, StepTimeoutError
from gapless.server.encoding import MAX_COMMAND_BYTES, decode_news, encode, packed_ids
from gapless.server.engine_child import EngineChild
from gapless.server.engine_client import ServedModelClient
from gapless.server.engine_link import EngineLink
from gapless.server.lifecycle import SocketFolder
from gapless.server.messages import (
    Accepted,
    CountersReply,
    GetCounters,
    News,
    Ready,
    Refused,
    Shutdown,
    StartEngine,
    StepNews,
    Submit,
    WireParams,
)

CONFIG = EngineConfig(device="cpu", num_blocks=256)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
GONE_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain(*"abcde", BYTE_EOS),
        rows(S={"S": 5.0}),
        max_position_embeddings=4096,
    )


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's sockets are; in the end none may be left."""
    place = tmp_path / "s"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    yield place
    assert not list(place.iterdir())


def children_since(earlier: Collection[psutil.Process]) -> list[psutil.Process]:
    """Child processes of this one that live and were not there before: servers that tests share are."""
    return [each for each in psutil.Process().children() if each not in earlier and not is_gone(each.pid)]


async def started(folder: Path, config: EngineConfig = CONFIG, **options: Any) -> ServedModelClient:
    async with asyncio.timeout(60):
        return await ServedModelClient.start(folder, config, **options)


# --- the engine dies ----------------------------------------------------------------------------------------------


class KillAt:
    """Kills the engine process when loading reaches a stage."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._earlier = psutil.Process().children()
        self.pid = 0

    def stage(self, name: str) -> None:
        if name == self._stage:
            [child] = children_since(self._earlier)
            self.pid = child.pid
            os.kill(child.pid, signal.SIGKILL)

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        pass


@pytest.mark.parametrize("stage", ["open checkpoint", "read weights"])
def test_c66_an_engine_killed_while_it_loads_fails_the_start(folder: Path, stage: str) -> None:
    async def everything() -> None:
        killer = KillAt(stage)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await started(folder, progress=killer)
        assert killer.pid
        await ended_within(killer.pid, GONE_WITHIN_S)

    asyncio.run(everything())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_c66_an_engine_killed_in_the_middle_ends_every_waiter(folder: Path, number: signal.Signals) -> None:
    async def everything() -> None:
        client = await started(folder, EngineConfig(device="cpu", num_blocks=256, max_rows=2))
        assert client.alive
        waiters = [asyncio.create_task(answer(client, "S", ENDLESS)) for _ in range(5)]
        await until(client, lambda stats: stats.running == 2)
        assert client.engine_pid
        os.kill(client.engine_pid, number)
        errors = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 1.0)
        assert not client.alive
        assert client.died.is_set()
        for newcomer in (answer(client, "a", GREEDY), client.counters()):
            with pytest.raises(EngineDeadError, match=number.name):
                await asyncio.wait_for(newcomer, 1.0)
        assert all(isinstance(error, EngineDeadError) and number.name in str(error) for error in errors)
        assert client.num_live == 0
        await client.close()

    asyncio.run(everything())


def test_c66_an_idle_engine_that_dies_is_noticed_at_once(folder: Path) -> None:
    async def everything() -> None:
        client = await started(folder)
        assert (await answer(client, "a", GREEDY)).outputs[0].text == "bcde"
        assert client.engine_pid
        os.kill(client.engine_pid, signal.SIGKILL)
        await asyncio.wait_for(client.died.wait(), 1.0)
        assert "SIGKILL" in str(client.error)
        await client.drain(5.0)
        await client.close()

    asyncio.run(everything())


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Of the engine processes that this test starts."""
    made = Faults(tmp_path / "faults")
    monkeypatch.setenv("PYTHONPATH", made.environment["PYTHONPATH"])
    return made


def test_c05_c66_a_fault_in_the_engines_loop_reaches_every_caller(folder: Path, faults: Faults) -> None:
    async def everything() -> None:
        client = await started(folder)
        waiters = [asyncio.create_task(answer(client, "S", ENDLESS)) for _ in range(5)]
        await until(client, lambda stats: stats.running == 5)
        faults.begin("raise")
        errors = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 1.0)
        with pytest.raises(EngineDeadError) as newcomer:
            await answer(client, "a", GREEDY)
        for error in [*errors, newcomer.value, client.error]:
            assert isinstance(error, EngineDeadError)
            assert "ArithmeticError: a made-up fault" in str(error)
        assert client.engine_pid
        await ended_within(client.engine_pid, GONE_WITHIN_S)
        await client.close()

    asyncio.run(everything())


def test_c66_a_step_that_never_comes_back_is_told(folder: Path, faults: Faults) -> None:
    async def everything() -> None:
        client = await started(folder, EngineConfig(device="cpu", num_blocks=256, step_timeout_s=1.0))
        waiter = asyncio.create_task(answer(client, "S", ENDLESS))
        await until(client, lambda stats: stats.running == 1)
        faults.begin("hang")
        with pytest.raises(StepTimeoutError, match="did not come back"):
            await asyncio.wait_for(waiter, 5.0)
        assert client.engine_pid
        await ended_within(client.engine_pid, GONE_WITHIN_S)
        await client.close()

    asyncio.run(everything())


# --- the parent dies ----------------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys, time
from gapless import EngineConfig, SamplingParams
from gapless.server.engine_client import ServedModelClient

class Tell:
    def stage(self, name):
        print(name, flush=True)
    def advance(self, bytes_done, bytes_total):
        pass

async def main():
    print("starting", flush=True)
    client = await ServedModelClient.start(sys.argv[1], EngineConfig(device="cpu", num_blocks=256), progress=Tell())
    print("ready", flush=True)
    async with await client.submit(
        await client.prepare_prompt("S"), SamplingParams(max_tokens=None, ignore_eos=True, temperature=0)
    ) as generation:
        async for deltas in generation:
            print("running", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("phase", ["born", "open checkpoint", "read weights", "ready", "running"])
def test_c66_no_engine_outlives_a_killed_parent(folder: Path, sockets: Path, phase: str) -> None:
    command = [sys.executable, "-c", PARENT, str(folder)]
    environment = {**os.environ, "TMPDIR": str(sockets)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout is not None
            wanted = "starting" if phase == "born" else phase
            assert any(line.strip() == wanted for line in parent.stdout), "it did not come so far"
            children: list[psutil.Process] = []
            while not children:
                children = psutil.Process(parent.pid).children()
            pids = [child.pid for child in children]
        finally:
            parent.kill()
            parent.wait()
    asyncio.run(_all_ended(pids))
    if phase == "born":  # later it has no name in the file system any more
        shutil.rmtree(next(sockets.iterdir()))


async def _all_ended(pids: list[int]) -> None:
    assert pids
    await eventually(lambda: all(is_gone(pid) for pid in pids), GONE_WITHIN_S)


def test_an_engine_whose_parent_is_another_ends_before_it_loads(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b", str(os.getppid()), str(theirs.fileno())]
        ended = subprocess.run(
            [sys.executable, "-m", "gapless.server.engine_process", *arguments],
            pass_fds=(theirs.fileno(),),
            timeout=30,
            check=False,
        )
    assert ended.returncode == 1


@pytest.mark.parametrize("loads", [False, True])
def test_a_cut_lifeline_ends_the_engine(folder: Path, loads: bool) -> None:
    with EngineAlone() as alone:
        if loads:
            alone.send(StartEngine(model=str(folder), is_path=True, config=CONFIG, log_level=30))
        alone.child.close()
        assert alone.exited.wait(30)
        assert alone.status == 1


def test_stop_signals_are_the_parents_business(folder: Path) -> None:
    async def everything() -> None:
        earlier = psutil.Process().children()
        starting = asyncio.create_task(started(folder))
        children: list[psutil.Process] = []
        while not children:
            await asyncio.sleep(0)
            children = children_since(earlier)
        for _ in range(100):  # from its first moment on
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(children[0].pid, number)
            await asyncio.sleep(0.005)
        client = await starting
        assert client.engine_pid == children[0].pid
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(client.engine_pid, number)
        assert (await answer(client, "a", GREEDY)).outputs[0].text == "bcde"
        await client.close()

    asyncio.run(everything())


# --- starts that fail ---------------------------------------------------------------------------------------------


def test_a_start_that_cannot_work_says_what_the_engine_would_say(tmp_path: Path) -> None:
    children = psutil.Process().children()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        asyncio.run(started(tmp_path))
    with pytest.raises(ConfigError, match="override_generation_config"):
        asyncio.run(started(tmp_path, override_generation_config={"heat": 1}))
    with pytest.raises(ConfigError, match="generation_config='file'"):
        asyncio.run(started(tmp_path, generation_config="file"))
    assert psutil.Process().children() == children


def test_a_missing_tokenizer_fails_the_start_and_ends_the_engine(tmp_path: Path) -> None:
    table_checkpoint(tmp_path, tokenizer=False)
    children = psutil.Process().children()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        asyncio.run(started(tmp_path))
    assert psutil.Process().children() == children


def test_a_cancelled_start_leaves_nothing(folder: Path) -> None:
    async def everything() -> None:
        earlier = psutil.Process().children()
        starting = asyncio.create_task(started(folder))
        await asyncio.sleep(0.5)
        [child] = children_since(earlier)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await ended_within(child.pid, GONE_WITHIN_S)

    asyncio.run(everything())


def test_sockets_lie_in_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = SocketFolder()
    assert folder.path.parent == Path("/tmp"), "a path that is too long for a socket is not used"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert len(folder.address("commands")) <= len("ipc://") + 107
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


# --- garbage ------------------------------------------------------------------------------------------------------


class EngineAlone:
    """An engine process whose parent is this test, which speaks its language by hand."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.exited = threading.Event()
        self._folder = SocketFolder()
        self._context = zmq.Context()
        self._pushers: list[Any] = []
        self.news = self._context.socket(zmq.PULL)
        self.news.set(zmq.RCVTIMEO, 60_000)
        self.news.bind(self._folder.address("news"))
        self.commands = self.pusher()
        self.child = EngineChild(self._folder.address("commands"), self._folder.address("news"), self._on_exit)

    def pusher(self) -> Any:
        pushing = self._context.socket(zmq.PUSH)
        pushing.connect(self._folder.address("commands"))
        self._pushers.append(pushing)
        return pushing

    def send(self, command: Any) -> None:
        self.commands.send(encode(command))

    def wait_for(self, kind: type[News]) -> Any:
        while not isinstance(news := decode_news(self.news.recv()), kind):
            pass
        return news

    def _on_exit(self, status: int) -> None:
        self.status = status
        self.exited.set()

    def __enter__(self) -> "EngineAlone":
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.kill()
        self.exited.wait(10)
        self.child.close()
        self._context.destroy(linger=0)
        self._folder.remove()


@pytest.fixture
def alone() -> Iterator[EngineAlone]:
    with EngineAlone() as made:
        yield made


def _submit(call: int, prompt: bytes, **fields: Any) -> Submit:
    values = {"params": WireParams.of(GREEDY), "stop_token_ids": [BYTE_EOS], "bad_words": [], "salt": b"", **fields}
    return Submit(call=call, prompt=prompt, **values)


def test_garbage_for_the_engine_is_counted_and_ignored(folder: Path, alone: EngineAlone) -> None:
    chance = random.Random(0)
    alone.send(GetCounters(call=0))  # too early
    alone.commands.send(b"")
    alone.send(StartEngine(model=str(folder), is_path=True, config=CONFIG, log_level=30))
    alone.wait_for(Ready)
    alone.send(StartEngine(model="other", is_path=True, config=CONFIG, log_level=30))
    num_sent = 3
    good = encode(_submit(1, packed_ids([97])))
    for size in range(200):
        for data in (chance.randbytes(size), good[: size % len(good)]):
            alone.commands.send(data)
            num_sent += 1
    alone.commands.send_multipart([b"two", b"frames"])
    alone.send(_submit(2, b"12345"))
    alone.send(_submit(3, packed_ids([97]), bad_words=[[-1]]))
    alone.send(_submit(4, packed_ids([97]), stop_token_ids=[2**40]))
    num_sent += 2 + 3
    for call in (2, 3, 4):
        assert alone.wait_for(Refused).call == call
    big = alone.pusher()  # too large: its connection is closed, and nothing of it is kept
    big.send(bytes(MAX_COMMAND_BYTES + 1))
    alone.send(_submit(5, packed_ids([97])))
    [choice] = alone.wait_for(Accepted).choice_ids
    last = alone.wait_for(StepNews)
    while not last.others or last.others[0].finish_reason is None:
        last = alone.wait_for(StepNews)
    assert last.others[0].choice_id == choice
    alone.send(GetCounters(call=9))
    stats = alone.wait_for(CountersReply).stats
    assert stats.num_malformed == num_sent
    assert is_idle(stats)
    alone.send(Shutdown())
    assert alone.exited.wait(10)
    assert alone.status == 0


def test_a_shutdown_before_the_options_ends_the_process(alone: EngineAlone) -> None:
    alone.send(Shutdown())
    assert alone.exited.wait(30)
    assert alone.status == 0


def test_garbage_for_the_api_process_is_counted_and_ignored(folder: Path) -> None:
    async def everything() -> None:
        link = EngineLink()
        context = zmq.Context()
        rogue = context.socket(zmq.PUSH)
        rogue.connect(link.news_address)
        chance = random.Random(0)
        rogue.send(b"not a message")
        await link.start(StartEngine(model=str(folder), is_path=True, config=CONFIG, log_level=30))
        await eventually(lambda: link.num_malformed == 1, 5.0)
        messages = [chance.randbytes(size) for size in range(1, 200)]
        messages += [
            encode(Accepted(call=77, choice_ids=[0])),
            encode(StepNews(choice_ids=b"123", tokens=b"", others=[])),
            encode(StepNews(choice_ids=b"", tokens=packed_ids([5]), others=[])),
        ]
        for message in messages:
            rogue.send(message)
        await eventually(lambda: link.num_malformed == 1 + len(messages), 5.0)
        assert (await link.counters()).num_malformed == 0
        context.destroy(linger=0)
        await link.close()

    asyncio.run(everything())


# --- what the processes consist of -----------------------------------------------------------------------------------


def test_the_engine_process_imports_no_web_server_and_is_tied_to_its_parent_before_torch() -> None:
    script = (
        "import sys; import gapless.server.engine_process; early = set(sys.modules);"
        "import gapless.server.engine_service; late = set(sys.modules);"
        "print(sorted({'torch', 'zmq', 'msgspec', 'numpy'} & early));"
        "print(sorted({'fastapi', 'starlette', 'uvicorn', 'pydantic', 'prometheus_client', 'tokenizers'} & late))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.splitlines() == ["[]", "[]"]


def test_idle_processes_use_no_time(folder: Path) -> None:
    with ClientInLoop(folder, CONFIG) as served:
        served.run(answer(served.client, "a", GREEDY))
        engine, ours = psutil.Process(served.client.engine_pid), psutil.Process()
        served.run(asyncio.sleep(0.5))

        def used_s(process: psutil.Process) -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        before = used_s(engine), used_s(ours)
        served.run(asyncio.sleep(1.0))
        assert used_s(engine) - before[0] < 0.05
        assert used_s(ours) - before[1] < 0.05


def test_the_engine_goes_on_while_this_process_is_busy(folder: Path) -> None:
    async def everything() -> None:
        client = served.client
        params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        generation = await client.submit(await client.prepare_prompt("S"), params)
        time.sleep(1.0)
        output = await generation.result()
        assert output.outputs[0].token_ids == [ord("S")] * 3000
        assert output.outputs[0].text == "S" * 3000

    with ClientInLoop(folder, CONFIG) as served:
        served.run(everything())
