"""A client that is killed leaves nothing in ``gapless serve``, whatever it was waiting for; nor does one that stalls.

One server, with two rows, prompts read sixteen tokens at a time, and steps of a quarter of a second where a test counts
them: so it is known how many ran after somebody had left.
"""

import asyncio
import json
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.fault_points import Faults
from e2e.served_process import Served, served
from fixtures.served_models import chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from fixtures.waiting import until

NUM_BLOCKS = 64
CAPACITY = 16 * NUM_BLOCKS
DEPTH = 2
STEPS_UNTIL_ABORTED = 2
SEND_TIMEOUT_S = 1.0
ENDLESS: dict[str, Any] = {"prompt": "S", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
# A megabyte for each choice, two at a time: more than kernels keep, and soon; it takes the engine many seconds.
MUCH: dict[str, Any] = {**ENDLESS, "prompt": "S" * 900, "echo": True, "logprobs": 20, "max_tokens": 50, "n": 40}
LONG_PROMPT = "S" * 480


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What ``/metrics`` tells."""

    connections: int
    in_progress: int
    held_bytes: int
    running: int
    waiting: int
    used_blocks: int
    steps: int
    aborted: int
    choices_aborted: int
    began: int

    @property
    def is_idle(self) -> bool:
        """Nobody but who asks is there, and nothing is left of those who were."""
        held = (self.in_progress, self.held_bytes, self.running, self.waiting, self.used_blocks)
        return self.connections == 1 and not any(held)


class Server:
    """A running server and its figures."""

    def __init__(self, process: Served, faults: Faults) -> None:
        self.process = process
        self.faults = faults

    def figures(self) -> Figures:
        status, text = self.process.ask("GET", "/metrics")
        assert status == 200
        values = {'gapless_choices_total{finish_reason="abort"}': "0"}  # not told before the first one
        values |= dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("gapless_"))

        def of(name: str) -> int:
            return int(float(values[f"gapless_{name}"]))

        return Figures(
            connections=of("http_connections"),
            in_progress=of("http_requests_in_progress"),
            held_bytes=of("http_held_body_bytes"),
            running=of("requests_running"),
            waiting=of("requests_waiting"),
            used_blocks=of('kv_cache_blocks{state="used"}'),
            steps=of("steps_total"),
            aborted=of("aborted_total"),
            choices_aborted=of('choices_total{finish_reason="abort"}'),
            began=of("queue_time_seconds_count"),
        )

    def wait_until_idle(self) -> Figures:
        until(lambda: self.figures().is_idle)
        return self.figures()

    def connect(self) -> socket.socket:
        return self.process.dial()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"), chain(*"abc", BYTE_EOS), rows(S={"S": 5.0}), max_position_embeddings=2048
    )


def arguments(checkpoint: Path, *more: str) -> list[str]:
    sizes = ["--num-blocks", str(NUM_BLOCKS), "--max-rows", "2", "--chunk-size", "16", "--depth", str(DEPTH)]
    return [str(checkpoint), "--device", "cpu", *sizes, *more]


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    faults = Faults(folder / "faults", send_timeout_s=SEND_TIMEOUT_S)
    options = arguments(checkpoint, "--port", "0", "--no-enable-prefix-caching")
    with served(folder / "log", *options, environment=faults.environment) as process:
        process.wait_until_ready()
        yield Server(process, faults)
        assert "Traceback" not in process.told


def request_of(fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + body


def kill(connection: socket.socket, *, resets: bool) -> None:
    """End a connection as the kernel does for a killed client: with FIN, or RST where it had not read everything."""
    if resets:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# --- each phase ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", request_of(ENDLESS)[:-5]], ids=["nothing", "head", "body"])
def test_c54_a_client_killed_before_its_request_is_whole(server: Server, sent: bytes, resets: bool) -> None:
    before = server.wait_until_idle()
    connection = server.connect()
    connection.sendall(sent)
    until(lambda: server.figures().connections == 2)
    if b"\r\n\r\n" in sent:
        until(lambda: server.figures().held_bytes)
    kill(connection, resets=resets)
    after = server.wait_until_idle()
    assert (after.choices_aborted, after.aborted, after.steps) == (before.choices_aborted, before.aborted, before.steps)


@pytest.mark.parametrize("resets", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({**ENDLESS, "stream": True}, True),
        ({**ENDLESS, "stream": True, "n": 2}, False),
        (ENDLESS, False),
        ({**ENDLESS, "prompt": LONG_PROMPT}, False),
    ],
    ids=["streams", "does not read", "waits for a whole answer", "is in a prefill"],
)
def test_c54_a_client_killed_while_its_request_runs(
    server: Server, fields: dict[str, Any], reads: bool, resets: bool
) -> None:
    before = server.wait_until_idle()
    server.faults.begin("crawl")
    try:
        connection = server.connect()
        connection.sendall(request_of(fields))
        if reads:
            while b"data: " not in connection.recv(65_536):
                pass
        num_choices = fields.get("n", 1)
        until(lambda: server.figures().running >= 1 and server.figures().steps >= before.steps + 2)
        at_the_end = server.figures()
        kill(connection, resets=resets)
        after = server.wait_until_idle()
    finally:
        server.faults.end("crawl")
    assert after.steps - at_the_end.steps <= STEPS_UNTIL_ABORTED + DEPTH
    assert after.choices_aborted - before.choices_aborted == num_choices
    assert after.aborted - before.aborted == num_choices


@pytest.mark.parametrize("resets", [False, True], ids=["FIN", "RST"])
def test_c54_a_client_killed_while_it_waits_is_never_begun_with(server: Server, resets: bool) -> None:
    before = server.wait_until_idle()
    server.faults.begin("crawl")
    try:
        with closing(server.connect()) as neighbour:
            neighbour.sendall(request_of({**ENDLESS, "n": 2, "stream": True}))
            until(lambda: server.figures().running == 2)
            waiting = server.connect()
            waiting.sendall(request_of({**ENDLESS, "n": 3, "stream": True}))
            until(lambda: server.figures().waiting == 3)
            kill(waiting, resets=resets)
            until(lambda: server.figures().connections == 2)
            until(lambda: server.figures().waiting == 0)
            assert server.figures().running == 2, "the neighbour goes on"
            assert server.figures().choices_aborted - before.choices_aborted == 3
    finally:
        server.faults.end("crawl")
    after = server.wait_until_idle()
    assert after.choices_aborted - before.choices_aborted == 5
    assert after.began - before.began == 1, "the neighbour alone"


# --- many ---------------------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "stream": {**ENDLESS, "stream": True},
    "whole": ENDLESS,
    "three choices": {**ENDLESS, "stream": True, "n": 3},
    "several prompts": {**ENDLESS, "prompt": ["S", "SS"], "n": 2},
    "long prompt": {**ENDLESS, "prompt": LONG_PROMPT, "stream": True},
}


def test_c54_three_hundred_clients_that_leave_leave_nothing(server: Server) -> None:
    async def one(number: int, seats: asyncio.Semaphore) -> None:
        draw = random.Random(number)
        async with seats:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.process.port)
            writer.write(request_of(list(KINDS.values())[number % len(KINDS)]))
            if draw.random() < 0.5:
                await asyncio.sleep(draw.random() * 0.05)
            elif number % len(KINDS) == 0:
                await reader.readuntil(b"data: ")
            if draw.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def crowd(numbers: range) -> None:
        seats = asyncio.Semaphore(12)
        async with asyncio.timeout(120):
            await asyncio.gather(*(one(number, seats) for number in numbers))

    api = psutil.Process(server.process.process.pid)
    asyncio.run(crowd(range(100)))
    before = server.wait_until_idle()
    files, memory = api.num_fds(), api.memory_info().rss
    asyncio.run(crowd(range(100, 400)))
    after = server.wait_until_idle()
    assert after.aborted > before.aborted + 25, "those at least who had read a token"
    until(lambda: api.num_fds() <= files)
    assert api.memory_info().rss - memory < 64 << 20
    # One that needs every block, right after.
    fields = {**ENDLESS, "prompt": [ord("S")] * (CAPACITY - 8), "max_tokens": 8}
    status, answer = server.process.ask("POST", "/v1/completions", fields)
    assert status == 200
    assert answer["choices"][0]["text"] == "S" * 8


# --- stalled readers ----------------------------------------------------------------------------------------------


def test_a_reader_that_takes_nothing_is_cut_off_on_tcp(server: Server) -> None:
    before = server.wait_until_idle()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", server.process.port))
        connection.sendall(request_of({**MUCH, "stream": True}))
        until(lambda: server.figures().running)
        server.process.wait_for("cut off unread=")
        after = server.wait_until_idle()
        assert_cut(connection)
    assert after.choices_aborted > before.choices_aborted


def test_a_reader_that_takes_nothing_is_cut_off_on_a_unix_socket(checkpoint: Path, tmp_path: Path) -> None:
    faults = Faults(tmp_path / "faults", send_timeout_s=SEND_TIMEOUT_S)
    options = arguments(checkpoint, "--uds", str(tmp_path / "s"))
    with served(tmp_path / "log", *options, environment=faults.environment) as process:
        process.wait_until_ready()
        server = Server(process, faults)
        with server.connect() as connection:
            connection.sendall(request_of({**MUCH, "stream": True}))
            process.wait_for("cut off unread=")
            # The engine tells its counters after the news of what it aborted.
            until(lambda: server.figures().aborted)
            after = server.wait_until_idle()
            assert_cut(connection)
        assert after.choices_aborted


def assert_cut(connection: socket.socket) -> None:
    """What had reached the kernel can be read, and then the connection ends in the midst of the stream."""
    data = b""
    try:
        while piece := connection.recv(1 << 16):
            data += piece
    except ConnectionResetError:
        pass
    assert b"data: {" in data
    assert b"[DONE]" not in data
