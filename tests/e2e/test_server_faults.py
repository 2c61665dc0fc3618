"""``gapless serve`` when a process is killed, raises or hangs: who is told what, and that nothing is left behind.

Each phase of a process's life is reached exactly, and stays while the test acts: see :mod:`e2e.fault_points`.
"""

import json
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, Literal

import pytest
import zmq

from e2e.fault_points import ENGINE_POINTS, SERVER_POINTS, Faults
from e2e.served_process import Served, gone, served
from fixtures.served_models import chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, CHATML
from fixtures.waiting import until

GONE_WITHIN_S = 2.0
ENDLESS: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True, "temperature": 0}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``S`` for ever; a chat's prompt ends with a newline, which leads there."""
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain(*"abcde", BYTE_EOS),
        chain("\n", "S"),
        rows(S={"S": 5.0}),
        chat_template=CHATML,
        max_position_embeddings=4096,
    )


def arguments(checkpoint: Path, *more: str) -> list[str]:
    return [str(checkpoint), "--device", "cpu", "--num-blocks", "256", "--port", "0", "--max-rows", "2", *more]


# --- kills at every phase -----------------------------------------------------------------------------------------

Victim = Literal["server", "engine"]
LOADING = (*SERVER_POINTS, *ENGINE_POINTS)
PHASES: dict[Victim, tuple[str, ...]] = {
    "server": (
        *LOADING,
        "reads a head",
        "reads a body",
        "streams and has a queue",
        "is in a prefill",
        "drains",
        "closes",
    ),
    "engine": (
        *ENGINE_POINTS,
        "loads the tokenizer",
        "is idle",
        "streams and has a queue",
        "is in a prefill",
        "drains",
        "closes",
    ),
}


class Scene:
    """A server on its way to a phase."""

    def __init__(self, folder: Path, checkpoint: Path, phase: str, stack: ExitStack) -> None:
        self.phase = phase
        self.streams: list[HTTPResponse] = []
        self.faults = Faults(folder, phase if phase in LOADING else None)
        self.faults.begin("crawl")
        more = ["--drain-timeout", "0.2"] if phase == "closes" else []
        self._stack = stack
        self.server: Served = stack.enter_context(
            served(folder / "log", *arguments(checkpoint, *more), environment=self.faults.environment)
        )

    def reach(self) -> None:
        """Wait for the phase, or bring it about."""
        if self.phase in LOADING:
            self.faults.wait_until_it_holds()
            return
        self.server.wait_until_ready()
        match self.phase:
            case "reads a head":
                self._send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-")
            case "reads a body":
                self._send(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n\r\n{")
            case "is in a prefill":
                self.faults.begin("hang")
                self._stream(1)
                self.faults.wait_until_it_hangs()
            case "streams and has a queue" | "drains":
                self._stream(4)
                for stream in self.streams[:2]:
                    assert stream.readline().startswith(b"data: {")
                if self.phase == "drains":
                    self.server.signal(signal.SIGTERM)
                    self.server.wait_for("draining")
            case "closes":
                self._stream(1)
                self.faults.begin("hang")
                self.faults.wait_until_it_hangs()
                self.server.signal(signal.SIGTERM)
                self.server.wait_for("drained")

    def _stream(self, count: int) -> None:
        for _ in range(count):
            self.streams.append(self._stack.enter_context(self.server.stream(ENDLESS["max_tokens"], "S")))

    def _send(self, data: bytes) -> None:
        connection = self._stack.enter_context(self.server.dial())
        connection.sendall(data)


class Fleet:
    """Scenes in the order of the tests, started a little ahead: a start takes seconds, and two cores start two."""

    AHEAD = 2

    def __init__(self, folder: Path, checkpoint: Path, order: list[tuple[Victim, str]]) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._order = order
        self._scenes: dict[tuple[Victim, str], tuple[Scene, ExitStack]] = {}

    def take(self, victim: Victim, phase: str, until_end: ExitStack) -> Scene:
        """A scene that has reached its phase; it ends with the stack."""
        place = self._order.index((victim, phase))
        for number in range(place, min(place + 1 + self.AHEAD, len(self._order))):
            if (key := self._order[number]) not in self._scenes:
                stack = ExitStack()
                self._scenes[key] = Scene(self._folder / str(number), self._checkpoint, key[1], stack), stack
        scene, stack = self._scenes[victim, phase]
        until_end.enter_context(stack)
        scene.reach()
        return scene

    def close(self) -> None:
        for _, stack in self._scenes.values():
            stack.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Fleet]:
    order = [(victim, phase) for victim, phases in PHASES.items() for phase in phases]
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), checkpoint, order)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.mark.parametrize("phase", PHASES["server"])
def test_c66_a_killed_server_leaves_no_engine(phase: str, fleet: Fleet) -> None:
    with ExitStack() as stack:
        scene = fleet.take("server", phase, stack)
        family = scene.server.family()
        assert len(family) == (1 if phase == "imports the server" else 2)
        scene.server.signal(signal.SIGKILL)
        scene.faults.go()
        assert gone(family, GONE_WITHIN_S)
        assert scene.server.end() == -signal.SIGKILL
        for stream in scene.streams if phase != "closes" else ():  # nobody waits for ever
            with pytest.raises((OSError, HTTPException)):
                stream.read()


@pytest.mark.parametrize("phase", PHASES["engine"])
def test_c66_an_engine_killed_in_any_phase_ends_the_server(phase: str, fleet: Fleet) -> None:
    with ExitStack() as stack:
        scene = fleet.take("engine", phase, stack)
        server = scene.server
        family = server.family()
        server.engine().send_signal(signal.SIGKILL)
        scene.faults.go()
        # The server is no orphan: it tells everybody and ends by itself, as fast as the machine lets it.
        assert server.end() == (1 if phase in LOADING else 0 if phase == "closes" else 70)
        assert gone(family, GONE_WITHIN_S)
        assert "Traceback" not in server.told
        if phase == "closes":
            return  # everybody had been told, and the engine was ending
        assert "the engine process was killed by SIGKILL" in server.told
        for stream in scene.streams:
            assert_told(stream.read().decode(), "the engine process was killed by SIGKILL")


def assert_told(text: str, cause: str) -> None:
    """A stream ended in an error that names the cause, and shows nothing of the inside."""
    *_, last, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    error = json.loads(last.strip().removeprefix("data: "))["error"]  # a line may have been read before
    assert error["code"] == "engine_dead"
    assert error["message"] == f"{cause}; no request can be served until the server is started again"


# --- an engine that dies while it serves --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "cause", "logged"),
    [
        ("raise", "the engine loop ended: ArithmeticError", "ArithmeticError: a made-up fault in /some/path"),
        ("hang", "a step did not come back within 2 s", "a step did not come back within 2 s: step "),
        ("kill", "the engine process was killed by SIGKILL", "the engine process was killed by SIGKILL"),
    ],
)
def test_c05_c58_c66_an_engine_that_dies_is_told_to_everybody(
    fault: Literal["raise", "hang", "kill"], cause: str, logged: str, checkpoint: Path, tmp_path: Path
) -> None:
    faults = Faults(tmp_path / "faults")
    faults.begin("crawl")
    options = arguments(checkpoint, *(("--step-timeout", "2") if fault == "hang" else ()))
    with served(tmp_path / "log", *options, environment=faults.environment) as server, ExitStack() as stack:
        server.wait_until_ready()
        family = server.family()
        streams = [stack.enter_context(server.stream(ENDLESS["max_tokens"], "S")) for _ in range(4)]
        asked = [stack.enter_context(closing(server.connect())) for _ in range(3)]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        asked[0].request("POST", "/v1/completions", json.dumps({"prompt": "S", **ENDLESS}), JSON)
        asked[1].request("POST", "/v1/chat/completions", json.dumps({**chat, **ENDLESS}), JSON)
        asked[2].request("POST", "/v1/responses", json.dumps({"input": "hi", "stream": True}), JSON)
        until(lambda: "\ngapless_requests_waiting 5.0\n" in server.ask("GET", "/metrics")[1])
        # A body that does not end keeps the server for two seconds more, in which we see what newcomers get.
        unfinished = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        unfinished.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 9999\r\n\r\n" + b" " * 2000
        )
        assert server.ask("GET", "/health") == (200, {"status": "ok"})
        if fault == "kill":
            server.engine().send_signal(signal.SIGKILL)
        else:
            faults.begin(fault)
        if fault == "hang":
            faults.wait_until_it_hangs()
        until(lambda: server.ask("GET", "/health")[0] == 503, 2.0 + (2.0 if fault == "hang" else 0.0))
        assert server.ask("GET", "/health") == (503, {"status": "dead"})
        assert server.ask("GET", "/ready") == (503, {"status": "dead"})
        status, refused = server.ask("POST", "/v1/completions", {"prompt": "a"})
        assert (status, refused["error"]["code"]) == (503, "dead")
        unfinished.close()
        for stream in streams:
            assert_told(stream.read().decode(), cause)
        for connection in asked[:2]:
            with connection.getresponse() as answer:
                assert answer.status == 503
                error = json.loads(answer.read())["error"]
            assert error["code"] == "engine_dead"
            assert error["message"].startswith(f"{cause}; ")
        with asked[2].getresponse() as answer:
            last = answer.read().decode().split("\n\n")[-2]
        assert last.startswith("event: response.failed\n")
        assert f"{cause}; " in last
        assert server.end() == 70
        assert gone(family, GONE_WITHIN_S)
        assert "the engine has died" in server.told
        assert logged in server.told


# --- malformed frames ---------------------------------------------------------------------------------------------


def test_malformed_frames_between_the_processes_disturb_no_stream(checkpoint: Path, tmp_path: Path) -> None:
    sockets = Path(tempfile.mkdtemp(prefix="gapless-test-"))
    # Only while the engine starts have its sockets a name: whoever wants to connect must have done so before.
    faults = Faults(tmp_path / "faults", "opens the checkpoint")
    environment = {**faults.environment, "TMPDIR": str(sockets)}
    context = zmq.Context()
    chance = random.Random(0)
    answers: list[str] = []
    try:
        with served(tmp_path / "log", *arguments(checkpoint), environment=environment) as server:
            faults.wait_until_it_holds()
            [folder] = sockets.iterdir()
            pushers = []
            for name in ("commands", "news"):
                pushers.append(context.socket(zmq.PUSH))
                pushers[-1].connect(f"ipc://{folder / name}")
                pushers[-1].send(b"nonsense")
            server.wait_for("the API process ignored a message")
            faults.go()
            server.wait_until_ready()
            server.wait_for("the engine process ignored a message")

            def read() -> None:
                with server.stream(400, "S") as stream:
                    answers.append(stream.read().decode())

            readers = [threading.Thread(target=read) for _ in range(4)]
            for reader in readers:
                reader.start()
            for size in range(200):
                for pusher in pushers:
                    pusher.send(chance.randbytes(size))
                time.sleep(0.001)
            for reader in readers:
                reader.join(60)
            assert server.ask("GET", "/health")[0] == 200
            assert server.ask("POST", "/v1/completions", {"prompt": "a"})[1]["choices"][0]["text"] == "bcde"
            assert server.told.count("the engine process ignored a message") > 200
            assert server.told.count("the API process ignored a message") > 200
            assert "Traceback" not in server.told
            server.signal(signal.SIGTERM)
            assert server.end() == 0
    finally:
        context.destroy(linger=0)
        shutil.rmtree(sockets)
    assert len(answers) == 4
    for answer in answers:
        *events, done, nothing = answer.split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        assert "".join(texts) == "S" * 400
