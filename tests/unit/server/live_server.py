"""An HTTP server in a thread of this process, behind the bounded protocol, and raw sockets to talk to it."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.types import Receive, Scope, Send

from gapless.server.http_limits import BodyMemory, BoundedHttpProtocol, HttpLimits
from gapless.server.metrics import ServerMetrics


class LiveServer:
    """A running uvicorn server."""

    def __init__(
        self, app: Any, *, limits: HttpLimits | None = None, loop: str = "uvloop", keep_alive_s: float = 5
    ) -> None:
        self.app = app
        self.metrics = ServerMetrics()
        limits = limits or HttpLimits()
        self.memory = BodyMemory(limits.max_held_body_bytes)
        protocol = partial(BoundedHttpProtocol, limits, self.memory, self.metrics)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                loop=loop,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]  # uvicorn only adds it to the time
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    @contextmanager
    def connection(self, timeout_s: float = 10.0) -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            yield connection

    def exchange(self, data: bytes, timeout_s: float = 10.0) -> bytes:
        """Send bytes, and return all that comes until the server closes the connection."""
        with self.connection(timeout_s) as connection:
            send(connection, data)
            return receive_all(connection)


def send(connection: socket.socket, data: bytes) -> int:
    """Send as much as the server takes; return how much that was."""
    sent = 0
    view = memoryview(data)
    while sent < len(data):
        try:
            sent += connection.send(view[sent : sent + 65_536])
        except OSError:
            break
    return sent


def receive_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    got = b""
    while True:
        try:
            part = connection.recv(65_536)
        except ConnectionError:
            return got
        if not part:
            return got
        got += part


def receive_answer(connection: socket.socket) -> bytes:
    """Read one answer, head and body, that says how long it is."""
    got = b""
    while b"\r\n\r\n" not in got:
        part = connection.recv(65_536)
        if not part:
            return got
        got += part
    head, _, body = got.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    length = int(lengths[0])
    while len(body) < length:
        body += connection.recv(65_536)
    return head + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    """The status of the first answer; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


class EchoApp:
    """Answers with what it saw of a request: method, path, and the body."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was seen, and answer at once."""
        self.seen: list[tuple[str, str, bytes]] = []
        self.headers: list[list[tuple[bytes, bytes]]] = []
        self.delay_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        await asyncio.sleep(self.delay_s)
        self.seen.append((scope["method"], scope["path"], body))
        self.headers.append(list(scope["headers"]))
        content = b"%s %s %d" % (scope["method"].encode(), scope["path"].encode(), len(body))
        headers = [(b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})
