"""A client that takes nothing of its answer loses its connection, however far it has come; a slow one does not."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from starlette.types import Receive, Scope, Send

from fixtures.waiting import until
from gapless.server.http_limits import HttpLimits
from gapless.server.sse import EventStreamResponse, event
from unit.server.live_server import LiveServer, receive_all

LIMITS = HttpLimits(send_timeout_s=0.5)
MUCH = 16 << 20  # more than sockets hold


class Talkative:
    """Answers with megabytes: events without end, all at once, or a half and no more."""

    def __init__(self) -> None:
        self.num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_running += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self.num_running -= 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await EventStreamResponse(_events(), nullcontext())(scope, receive, send)
            return
        is_half = scope["path"] == "/half"
        headers = [(b"content-length", b"%d" % MUCH)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = bytes(MUCH // 2 if is_half else MUCH)
        await send({"type": "http.response.body", "body": body, "more_body": is_half})


async def _events() -> AsyncGenerator[bytes, None]:
    while True:
        yield event(b"x" * 10_000)
        await asyncio.sleep(0)


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    with LiveServer(Talkative(), limits=LIMITS, loop=request.param, keep_alive_s=60) as server:
        yield server


@contextmanager
def asked(server: LiveServer, *paths: str, closes: bool = False) -> Iterator[socket.socket]:
    """A connection with so many requests, of which nothing is read yet."""
    with server.connection() as connection:
        until(lambda: server.server.server_state.connections)
        for path in paths:
            last = b"Connection: close\r\n" if closes else b""
            connection.sendall(b"GET %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (path.encode(), last))
        yield connection


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("paths", [["/stream"], ["/whole"], ["/half"], ["/whole", "/whole"]], ids=" ".join)
def test_a_reader_that_takes_nothing_loses_its_connection(server: LiveServer, paths: list[str], closes: bool) -> None:
    with asked(server, *paths, closes=closes) as connection:
        until(lambda: not server.server.server_state.connections)
        until(lambda: server.app.num_running == 0)
        assert len(receive_all(connection)) < MUCH, "what had reached the kernel, and then the end"


def test_a_slow_reader_gets_everything(server: LiveServer) -> None:
    with asked(server, "/whole", closes=True) as connection:
        until(lambda: server.app.num_running == 0)  # all is written, and next to nothing taken
        num_bytes = 0
        while part := connection.recv(1 << 20):
            num_bytes += len(part)
            time.sleep(0.02)
    assert num_bytes > MUCH


def idle_until_s(server: LiveServer) -> float | None:
    """When the only connection is to be closed, on its loop's clock; ``None`` while its request is being answered."""
    [connection] = server.server.server_state.connections
    timer: asyncio.TimerHandle | None = connection.timeout_keep_alive_task  # type: ignore[union-attr]
    return None if timer is None else timer.when()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_reader_slower_than_an_idle_connection_may_be_gets_everything(loop: str) -> None:
    keep_alive_s = 0.3
    with (
        LiveServer(Talkative(), limits=HttpLimits(), loop=loop, keep_alive_s=keep_alive_s) as server,
        asked(server, "/whole") as connection,
    ):
        until(lambda: idle_until_s(server) is not None)  # all is written, and next to nothing taken
        time.sleep(3 * keep_alive_s)
        assert len(receive_all(connection)) > MUCH, "until the server closes the connection, which is idle now"


def test_a_connection_is_idle_once_its_answer_has_been_taken(server: LiveServer) -> None:
    with asked(server, "/whole") as connection:
        until(lambda: idle_until_s(server) is not None)
        first_s, num_bytes = idle_until_s(server), 0
        while num_bytes < MUCH:
            num_bytes += len(connection.recv(1 << 20))
        until(lambda: idle_until_s(server) != first_s)
    until(lambda: not server.server.server_state.connections)


def test_an_answer_that_stays_incomplete_ends_with_its_connection(server: LiveServer) -> None:
    with asked(server, "/half") as connection:
        assert len(receive_all(connection)) < MUCH
    until(lambda: not server.server.server_state.connections)
