"""A server for tests that says exactly what it is told to, byte by byte, over a real socket.

Handlers get a request and do with the answer as they like: whole, streamed with pauses, broken off. The server keeps a
log of what came and when.
"""

import asyncio
import json
import queue
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[["Received", "Answer"], Awaitable[None]]


@dataclass(kw_only=True)
class Received:
    """One request; ``connection`` counts the connections of the server from 0."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int
    at_s: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Answer:
    """Writes a response."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.keeps_connection = True

    async def raw(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def whole(self, status: int, body: Any, *, extra: str = "") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
        await self.raw(head.encode() + data)

    async def begin_stream(self) -> None:
        await self.raw(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data))

    async def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        await self.chunk(f"data: {text}\n\n".encode())

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def break_off(self) -> None:
        self.keeps_connection = False
        self._writer.close()


@dataclass(kw_only=True)
class Server:
    """A running server."""

    url: str
    received: list[Received] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Server]:
    """Serve on a free port of this machine while the block runs."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        number = server.connections
        server.connections += 1
        try:
            while request := await _read(reader, number):
                server.received.append(request)
                answer = Answer(writer)
                await handler(request, answer)
                if not answer.keeps_connection:
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            writer.close()
            tasks.discard(task)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    server = Server(url=f"http://{host}:{port}")
    try:
        yield server
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.wait_closed()


@contextmanager
def serving_in_a_thread(handler: Handler) -> Iterator[Server]:
    """The same with an event loop of its own, for callers that block."""
    started: queue.Queue[Server] = queue.Queue()
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with serving(handler) as server:
            started.put(server)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), name="speaking-server", daemon=True)
    thread.start()
    try:
        yield started.get(timeout=10)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


async def _read(reader: asyncio.StreamReader, connection: int) -> Received | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    at_s = time.perf_counter()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Received(method=method, path=path, headers=headers, body=body, connection=connection, at_s=at_s)


def chat_chunk(text: str | None, **more: Any) -> dict[str, Any]:
    """A chunk of a chat's stream."""
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}}], **more}


def text_chunk(text: str) -> dict[str, Any]:
    """A chunk of a completion's stream."""
    return {"choices": [{"index": 0, "text": text}]}


def usage_chunk(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The last chunk before the end."""
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


async def answer_models(request: Received, answer: Answer) -> bool:
    """Answer the list of models; returns whether that is what was asked for."""
    if request.path != "/v1/models":
        return False
    await answer.whole(200, {"data": [{"id": "the-model"}, {"id": "another"}]})
    return True
