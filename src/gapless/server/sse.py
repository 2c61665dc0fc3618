"""Server-sent events: :class:`EventStreamResponse` writes a stream and ends it when the client has gone.

One task writes, one listens for the end of the connection; whichever ends first ends the other. Closing the generator
of events is what aborts a generation, so it is closed on every path. Each ``send`` waits while the socket's buffer is
full: a slow reader gets fewer and larger chunks, and one that takes nothing for ``SEND_TIMEOUT_S`` is given up.

Belongs to the event loop.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "SEND_TIMEOUT_S", "EventStreamResponse", "event", "named_event", "unless_client_leaves"]

DONE: Final = b"data: [DONE]\n\n"
SEND_TIMEOUT_S: Final = 120.0

_Result = TypeVar("_Result")


def event(data: bytes) -> bytes:
    """An event without a name, as chats and completions have them."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """An event with a name, as the Responses API has them."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStreamResponse(Response):
    """Writes what a generator of events gives.

    Args:
        events: complete events, any number at once. It is closed when the client goes, and handles its own errors: by
            then the status has been sent.
        lifetime: what the events come from; entered before the first of them, left on every path.
        send_timeout_s: how long a chunk may wait for a reader.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        lifetime: AbstractAsyncContextManager[object],
        *,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # An empty body would have a length; a stream has none.
        self.raw_headers = [header for header in self.raw_headers if header[0] != b"content-length"]
        self._events = events
        self._lifetime = lifetime
        self._send_timeout_s = send_timeout_s
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream to its end, or to the client's."""
        async with self._lifetime:
            writer = asyncio.ensure_future(self._write(send))
            listener = asyncio.ensure_future(_client_leaves(receive))
            try:
                while not await _first_of(writer, listener, timeout_s=self._send_timeout_s / 4):
                    if self._is_stuck():
                        break
                if writer.done():
                    writer.result()
            finally:
                await _end(writer, listener)
                await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = time.monotonic
        try:
            async for chunk in self._events:
                # A time-out of asyncio would cost more than all else that is done for a chunk.
                self._sending_since_s = clock()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                self._sending_since_s = None
        except OSError:  # the connection broke
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_stuck(self) -> bool:
        """Whether a chunk has waited too long for its reader."""
        since_s = self._sending_since_s
        return since_s is not None and time.monotonic() - since_s > self._send_timeout_s


async def unless_client_leaves(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Await work that nobody needs once the client has gone.

    Raises:
        ClientDisconnect: it has; the work was cancelled.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_client_leaves(request.receive))
    try:
        await _first_of(task, listener)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _end(task, listener)


async def _first_of(*tasks: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Wait until one of the tasks is done; false if that took too long."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what is still running and wait for its clean-up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
