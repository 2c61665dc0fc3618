"""The whole app as ``gapless serve`` puts it together, under settings of a test's choosing, before a running engine."""

import asyncio
import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Any, Self

import uvicorn

from fixtures.api_server import ApiServer, Reply
from gapless.server.app import create_app
from gapless.server.context import ServerContext
from gapless.server.http_limits import BodyMemory, BoundedHttpProtocol, HttpLimits
from gapless.server.limits import RequestGate
from gapless.server.metrics import ServerMetrics
from gapless.server.settings import ServerSettings
from unit.server.live_server import receive_all, send


class Door:
    """One more way to an engine: an app, its gate and the bounded protocol, with a port of their own. A context.

    Args:
        server: whose engine it is; the door lives in its loop.
        settings: of this door alone.
    """

    def __init__(self, server: ApiServer, settings: ServerSettings) -> None:
        assert server.context is not None
        self.server = server
        self.settings = settings
        self.context = ServerContext(
            client=server.context.client,
            settings=settings,
            metrics=ServerMetrics(),
            gate=RequestGate(max_concurrent=settings.max_concurrent_requests, timeout_s=settings.request_timeout_s),
        )
        self.app = create_app(self.context)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Self:
        self.server.run(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.run(self._end())
        self._socket.close()

    async def _start(self) -> None:
        limits = HttpLimits(max_body_bytes=self.settings.max_body_bytes)
        protocol = partial(BoundedHttpProtocol, limits, BodyMemory(limits.max_held_body_bytes), self.context.metrics)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=protocol,  # type: ignore[arg-type]
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.ensure_future(self._uvicorn.serve(sockets=[self._socket]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.01)

    async def _end(self) -> None:
        self._uvicorn.should_exit = True
        await self._serving

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        """A connection of one's own."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request and its whole answer; a body is sent as JSON."""
        content = None if body is None else json.dumps(body).encode()
        told = {} if body is None else {"Content-Type": "application/json"}
        with closing(self.connect()) as connection:
            connection.request(method, path, content, {**told, **(headers or {})})
            answer = connection.getresponse()
            got = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(status=answer.status, headers=got, raw=answer.read())

    def exchange(self, data: bytes, timeout_s: float = 20.0) -> bytes:
        """Send bytes, and return all that comes until the server closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            send(connection, data)
            return receive_all(connection)
