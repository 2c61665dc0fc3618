"""Streams of events end cleanly whatever ends them: their source, their client, or a client that reads nothing."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from gapless.server.sse import EventStreamResponse, event, named_event, unless_client_leaves


class Source:
    """Events without end, or some; knows what was left and closed."""

    def __init__(self, count: int | None = None) -> None:
        self.log: list[str] = []
        self._count = count

    async def events(self) -> AsyncGenerator[bytes, None]:
        number = 0
        try:
            while number != self._count:
                yield event(b"%d" % number)
                number += 1
                await asyncio.sleep(0)
        finally:
            self.log.append("closed")

    @asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        self.log.append("entered")
        try:
            yield
        finally:
            self.log.append("left")


class Client:
    """The other side of an ASGI call: leaves after some chunks, or stops to read."""

    def __init__(self, *, leaves_after: int | None = None, reads: int | None = None) -> None:
        self.messages: list[Message] = []
        self._leaves_after = leaves_after
        self._reads = reads
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        if len(self.messages) == self._leaves_after:
            self._gone.set()
        if len(self.messages) == self._reads:
            await asyncio.Event().wait()


async def serve(source: Source, client: Client, **options: Any) -> None:
    response = EventStreamResponse(source.events(), source.lifetime(), **options)
    async with asyncio.timeout(10):
        await response({"type": "http"}, client.receive, client.send)


def test_a_stream_that_ends() -> None:
    async def run() -> tuple[Source, Client]:
        source, client = Source(3), Client()
        await serve(source, client)
        return source, client

    source, client = asyncio.run(run())
    assert source.log == ["entered", "closed", "left"]
    start, *bodies = client.messages
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert b"".join(body["body"] for body in bodies) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert [body["more_body"] for body in bodies] == [True, True, True, False]


def test_c54_a_client_that_leaves_ends_the_source() -> None:
    async def run() -> Source:
        source = Source()
        await serve(source, Client(leaves_after=5))
        return source

    assert asyncio.run(run()).log == ["entered", "closed", "left"]


def test_a_client_that_reads_nothing_is_given_up() -> None:
    async def run() -> Source:
        source = Source()
        await serve(source, Client(reads=4), send_timeout_s=0.05)
        return source

    assert asyncio.run(run()).log == ["entered", "closed", "left"]


def test_a_cancelled_stream_ends_its_source() -> None:
    async def run() -> Source:
        source = Source()
        task = asyncio.ensure_future(serve(source, Client()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return source

    assert asyncio.run(run()).log == ["entered", "closed", "left"]


def test_c54_work_that_nobody_waits_for_is_cancelled() -> None:
    log = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            log.append("cancelled")

    async def run() -> None:
        client = Client(leaves_after=1)
        await client.send({"type": "a chunk"})
        with pytest.raises(ClientDisconnect):
            await unless_client_leaves(Request({"type": "http"}, client.receive), work())

    asyncio.run(run())
    assert log == ["cancelled"]


def test_events_with_a_name() -> None:
    assert named_event("response.created", b"{}") == b"event: response.created\ndata: {}\n\n"
