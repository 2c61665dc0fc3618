"""Bounded HTTP: :class:`BoundedHttpProtocol`, uvicorn's protocol behind a gate that knows where each request ends.

uvicorn's own protocol lets a head, a header and a queue of pipelined requests grow without end, and waits for ever for
a client that sends slowly. Here bytes are cut into requests first (:mod:`gapless.server.http_framing`); httptools sees
one whole head at a time, and the next request only when the one before has been answered. A connection holds at most a
head, one read and the body of the request being answered, and all bodies together have a limit (:class:`BodyMemory`).
Trailers and chunk extensions are dropped.

Writing has an end too. asyncio's ``close`` waits until all is written, which a reader that takes nothing puts off for
ever: on TCP the kernel gives up after a while, on a Unix socket nobody does. So a connection whose reader takes nothing
for ``send_timeout_s`` is aborted, and so is one whose answer the app has left in the middle.

A refused request gets its answer, then up to a second to read it, while what still comes in is thrown away: closing at
once would reset the connection under the answer. Belongs to the event loop; one protocol a connection, one
:class:`BodyMemory` a server.
"""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httptools
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from gapless.server.http_framing import MAX_HEAD_BYTES, BodyReader, RefusalError, read_head
from gapless.server.logs import fields
from gapless.server.metrics import ServerMetrics

__all__ = ["BodyMemory", "BoundedHttpProtocol", "HttpLimits"]

_log = logging.getLogger("gapless.access")

# A body that brings less than this in a window of `body_timeout_s` makes no progress.
LEAST_PROGRESS_BYTES: Final = 1024
LINGER_S: Final = 1.0
MAX_LINGER_BYTES: Final = 64 << 20
_END_OF_HEAD: Final = b"\r\n\r\n"
_REASONS: Final = {408: "slow", 413: "body", 429: "bodies", 431: "head", 503: "connections"}
_COME_AGAIN: Final = (429, 503)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """What a connection may cost, and all bodies together. Times in seconds."""

    max_body_bytes: int = 8 << 20
    max_held_body_bytes: int = 512 << 20
    max_connections: int = 4096
    head_timeout_s: float = 5.0
    body_timeout_s: float = 5.0
    send_timeout_s: float = 120.0


class BodyMemory:
    """The bytes of all request bodies that a server holds: a body stays in memory until its request is answered.

    Args:
        max_bytes: most of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that have come.

        Raises:
            RefusalError: 429, they would be too many; none of them is counted.
        """
        if self.num_bytes + num_bytes > self._max_bytes:
            raise RefusalError(
                429, f"the requests being answered hold {self._max_bytes} bytes of bodies, the limit; try later"
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count bytes that are not held any more."""
        self.num_bytes -= num_bytes


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection; uvicorn makes it with the arguments after the first three.

    Args:
        limits: of every connection.
        memory: of the server's bodies.
        metrics: hears of refusals.
        config, server_state, app_state: uvicorn's.
    """

    def __init__(
        self,
        limits: HttpLimits,
        memory: BodyMemory,
        metrics: ServerMetrics,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._memory = memory
        self._metrics = metrics
        self._head = bytearray()
        self._body: BodyReader | None = None
        self._num_held = 0  # bytes of the body of the request that is being answered
        self._next = b""  # of requests behind the one that is being answered
        self._timer: asyncio.TimerHandle | None = None
        self._progress = 0
        self._was_paused = False
        self._num_lingered: int | None = None  # bytes thrown away since a refusal
        self._reader_timer: asyncio.TimerHandle | None = None
        self._loaded_app = self.app
        self.app = self._run_app

    # --- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it where there are too many."""
        super().connection_made(transport)
        self._metrics.set_gauge("http_connections", len(self.connections))
        if len(self.connections) > self._limits.max_connections:
            self._refuse(RefusalError(503, "too many connections are open"))
        else:
            self._start_timer(self._limits.head_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget everything."""
        self._stop_timer()
        self._stop_watching()
        self._head.clear()
        self._forget_body()
        self._next = b""
        super().connection_lost(exc)
        self._metrics.set_gauge("http_connections", len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        if self._num_lingered is not None:
            self._num_lingered += len(data)
            if self._num_lingered > MAX_LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        try:
            while data:
                if self._body is not None:
                    data = self._take_body(self._body, data)
                elif self.cycle is not None and not self.cycle.response_complete:
                    data = self._put_aside(data)
                else:
                    data = self._take_head(data)
        except RefusalError as refusal:
            self._refuse(refusal)

    def on_response_complete(self) -> None:
        """Go on with what the client has sent meanwhile."""
        super().on_response_complete()
        self._release_memory()
        if self._body is not None and self.expect_100_continue:
            # Nobody knows whether the client will still send the body that it held back.
            self.transport.close()
        elif self._next:
            self.loop.call_soon(self._go_on)
        if self._reader_timer is None:
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection. One whose answer is still being read is none: its reader is watched instead."""
        if self.transport.get_write_buffer_size():
            self._start_idle_clock()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: the app waits, and the reader is watched."""
        super().pause_writing()
        if self._reader_timer is None:
            self._watch_reader()

    def resume_writing(self) -> None:
        """The client has taken nearly all; if that was the end of an answer, the connection is idle from now on."""
        super().resume_writing()
        if self.timeout_keep_alive_task is not None:
            self._start_idle_clock()

    # --- a request ----------------------------------------------------------------------------------------------------

    def _take_head(self, data: bytes) -> bytes:
        """Gather a head and, when it is whole, start its request; return what follows it."""
        searched = max(len(self._head) - len(_END_OF_HEAD) + 1, 0)
        self._head += data
        while self._head.startswith(b"\r\n"):  # some clients send an empty line between requests
            del self._head[:2]
            searched = 0
        end = self._head.find(_END_OF_HEAD, searched)
        length = len(self._head) if end < 0 else end + len(_END_OF_HEAD)
        if length > MAX_HEAD_BYTES:
            raise RefusalError(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            if self._timer is None:
                self._start_timer(self._limits.head_timeout_s, self._head_is_late)
            return b""
        head, rest = bytes(self._head[:length]), bytes(self._head[length:])
        self._head.clear()
        self._stop_timer()
        self._start_request(head)
        return rest

    def _start_request(self, head: bytes) -> None:
        framing = read_head(head, max_body_bytes=self._limits.max_body_bytes)
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            pass  # no other protocol is spoken here: it is answered as the request it is
        except httptools.HttpParserError:
            raise RefusalError(400, "the request is malformed") from None
        body = BodyReader(framing, max_bytes=self._limits.max_body_bytes)
        if body.is_complete:
            super().on_message_complete()
            return
        self._body = body
        self._progress = 0
        self._start_timer(self._limits.body_timeout_s, self._body_is_late)

    def on_message_complete(self) -> None:
        """Nothing: httptools sees heads only, so it cannot know when a message is complete."""

    def _take_body(self, body: BodyReader, data: bytes) -> bytes:
        """Hand a part of the body on; return what follows the body."""
        self._progress += len(data)
        part = body.feed(data)
        if part and not self.cycle.response_complete:
            self._memory.take(len(part))
            self._num_held += len(part)
            super().on_body(part)
            self._was_paused = self._was_paused or self.flow.read_paused
        if not body.is_complete:
            return b""
        self._body = None
        self._stop_timer()
        super().on_message_complete()
        return body.rest

    def _forget_body(self) -> None:
        self._body = None
        self._release_memory()

    def _release_memory(self) -> None:
        self._memory.give_back(self._num_held)
        self._num_held = 0

    def _put_aside(self, data: bytes) -> bytes:
        """Keep the beginning of further requests until this one is answered."""
        self._next += data
        if len(self._next) > MAX_HEAD_BYTES:
            raise RefusalError(400, "too much was sent before the answer to the request in front")
        return b""

    def _go_on(self) -> None:
        data, self._next = self._next, b""
        if not self.transport.is_closing():
            self.data_received(data)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _start_idle_clock(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_timer(self, delay_s: float, callback: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, callback)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        if self._head:
            self._refuse(RefusalError(408, f"no whole head came within {self._limits.head_timeout_s:g} s"))
        elif not self.transport.is_closing():
            self.transport.close()

    def _body_is_late(self) -> None:
        waits_for_us = self._was_paused or self.flow.read_paused or self.cycle.waiting_for_100_continue
        if self._progress < LEAST_PROGRESS_BYTES and not waits_for_us:
            self._refuse(RefusalError(408, f"less than {LEAST_PROGRESS_BYTES} bytes of the body came in time"))
            return
        self._progress = 0
        self._was_paused = False
        self._start_timer(self._limits.body_timeout_s, self._body_is_late)

    def _watch_reader(self) -> None:
        """Look again after a while whether the client has taken anything of what waits for it."""
        self._reader_timer = None
        if num_unread := self.transport.get_write_buffer_size():
            look = partial(self._reader_is_late, num_unread)
            self._reader_timer = self.loop.call_later(self._limits.send_timeout_s, look)

    def _reader_is_late(self, num_unread: int) -> None:
        if self.transport.get_write_buffer_size() == num_unread:
            self._cut_off()
        else:
            self._watch_reader()

    def _stop_watching(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _run_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; what it leaves in the middle, or cannot even begin to write, ends with the connection."""
        cycle = self.cycle
        try:
            await self._loaded_app(scope, receive, send)
        finally:
            is_left = not (cycle.response_complete or cycle.disconnected)
            if is_left and (cycle.response_started or self.flow.write_paused):
                cycle.disconnected = True  # uvicorn has nothing to add
                self._cut_off()

    def _cut_off(self) -> None:
        """End the connection now, with whatever has not been read."""
        address = self.client[0] if self.client else None
        _log.info("cut off", extra=fields(unread=self.transport.get_write_buffer_size(), client=address))
        self.transport.abort()

    def _refuse(self, refusal: RefusalError) -> None:
        """Answer in the app's place, unless it has begun to, and end the connection."""
        reason = _REASONS.get(refusal.status, "malformed")
        self._metrics.count("http_refusals_total", reason)
        address = self.client[0] if self.client else None
        _log.info("refused", extra=fields(status=refusal.status, reason=refusal.message, client=address))
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._num_lingered = 0
        self._head.clear()
        is_answered = self._body is not None and self.cycle.response_complete
        self._forget_body()
        self._next = b""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True  # the app hears that there is nobody to answer any more
            self.cycle.message_event.set()
            if has_begun:
                self.transport.abort()
                return
        if not is_answered:  # the app has answered without the rest of the body
            self.transport.write(_refusal_bytes(refusal))
        self.transport.resume_reading()
        self.transport.write_eof()
        self._start_timer(LINGER_S, self.transport.abort)


def _refusal_bytes(refusal: RefusalError) -> bytes:
    kind = {429: "rate_limit_error", 503: "server_error"}.get(refusal.status, "invalid_request_error")
    error = {"message": refusal.message, "type": kind, "param": None, "code": _REASONS.get(refusal.status, "malformed")}
    content = msgspec.json.encode({"error": error})
    retry = b"retry-after: 1\r\n" if refusal.status in _COME_AGAIN else b""
    return b"".join(
        (
            STATUS_LINE[refusal.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            retry,
            b"content-length: %d\r\n\r\n" % len(content),
            content,
        )
    )
