"""What every HTTP request passes before the app sees it: :class:`Front`.

In this order: an id, the probes, the Host check, the API key, the server's own routes, the gate (draining, too many),
the app under its deadline. And on the way back: an answer in the error form for whatever the app did not answer, the
id as a header, a line in the access log, the metrics. It is plain ASGI, so that an endpoint sees disconnects through
``receive`` as if nothing stood in between. Belongs to the event loop.

Nothing is decided by comparing a request's path with a list. The probes are routes of their own, and the route that
matches is the one that answers; whatever matches none needs a key before the app sees it, be it a route, a mount, a
path that does not exist or a method that is not allowed. So a route added to the app is guarded from the start.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gapless.errors import shown
from gapless.server.error_bodies import CLIENT_CLOSED_REQUEST, ApiError, api_error_of, error_content
from gapless.server.keys import KeyRing, host_of
from gapless.server.limits import Turn
from gapless.server.logs import fields, name_request
from gapless.server.probes import guarded_routes, public_routes
from gapless.server.sse import DONE, event, named_event

if TYPE_CHECKING:
    from gapless.server.context import ServerContext

__all__ = ["Front"]

_log = logging.getLogger("gapless.access")

_SANE_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_LOGGED_PATH_CHARACTERS: Final = 200
_LOGGED_BODY_BYTES: Final = 16_384
_RETRY_AFTER_S: Final = {"draining": "5", "starting": "5", "dead": "10", "full": "1"}
_EVENTS: Final = b"text/event-stream"
_TAIL_TIMEOUT_S: Final = 1.0
# A request that got no answer because it took too long would take as long the next time.
_NO_RETRY: Final = {"x-should-retry": "false"}


class Front:
    """ASGI middleware around the whole app.

    Args:
        app: what it guards.
        context: of the server.
    """

    def __init__(self, app: ASGIApp, context: "ServerContext") -> None:
        settings = context.settings
        self._app = app
        self._gate = context.gate
        self._metrics = context.metrics
        self._keys = KeyRing(settings.api_keys)
        self._hosts = settings.accepted_hosts
        self._log_prompts = settings.log_prompts
        self._access_log = settings.access_log
        self._public = public_routes(context)
        self._guarded = guarded_routes(context)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; what is no request (the lifespan) goes through, and a websocket ends here."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s = time.perf_counter()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        name_request(request_id)
        exchange = _Exchange(receive, send, request_id, self._gate_is_open)
        body = exchange.keep_body(_LOGGED_BODY_BYTES) if self._log_prompts else None
        try:
            await self._answer(scope, exchange)
        except ApiError as error:
            await exchange.fail(error, scope)
        except Exception as error:
            await exchange.fail(api_error_of(error), scope)
        finally:
            self._report(scope, exchange, began_s, body)

    async def _answer(self, scope: Scope, exchange: "_Exchange") -> None:
        if (route := _matching(self._public, scope)) is not None:
            await _serve(route, scope, exchange)
            return
        headers = scope["headers"]
        if "*" not in self._hosts and (host := host_of(headers)) not in self._hosts:
            self._metrics.count("http_refusals_total", "host")
            raise ApiError(
                403, f"the Host header {shown(host)} is not accepted here; see --allowed-host", code="host_not_allowed"
            )
        salt = self._keys.salt_for(headers)
        if salt is None:
            self._metrics.count("http_refusals_total", "key")
            raise ApiError(
                401,
                "the API key is missing or wrong; send Authorization: Bearer <key>",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        scope["state"]["salt"] = salt
        if (route := _matching(self._guarded, scope)) is not None:
            await _serve(route, scope, exchange)
        else:
            await self._work(scope, exchange)

    async def _work(self, scope: Scope, exchange: "_Exchange") -> None:
        """Hand a request to the app, behind the gate if it can make work."""
        phase = self._gate.phase
        if phase != "open":
            self._metrics.count("http_refusals_total", phase)
            raise ApiError(
                503, f"the server is {_PHASES[phase]}", code=phase, headers={"Retry-After": _RETRY_AFTER_S[phase]}
            )
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, exchange.receive, exchange.send)
            return
        if self._gate.is_full:
            self._metrics.count("http_refusals_total", "full")
            raise ApiError(
                429,
                f"{self._gate.max_concurrent} requests are running, which is the limit; try again later",
                code="too_many_requests",
                headers={"Retry-After": _RETRY_AFTER_S["full"]},
            )
        turn: Turn | None = None
        try:
            async with self._gate.turn() as turn:
                await self._app(scope, exchange.receive, exchange.send)
        except TimeoutError:
            if turn is None or not turn.was_cut_off:
                raise
            raise self._cut_off(turn) from None

    def _cut_off(self, turn: Turn) -> ApiError:
        if turn.ended_by == "shutdown":
            return ApiError(503, "the server is shutting down", code="shutdown", headers={"Retry-After": "5"})
        message = f"the request took longer than {self._gate.timeout_s:g} s; ask for fewer tokens"
        return ApiError(504, message, code="request_timeout", headers=_NO_RETRY)

    def _gate_is_open(self) -> bool:
        return self._gate.phase == "open"

    def _report(self, scope: Scope, exchange: "_Exchange", began_s: float, body: bytearray | None) -> None:
        route = getattr(scope.get("route"), "path", None) or "unmatched"
        self._metrics.count("http_requests_total", route, scope["method"], str(exchange.status))
        if not self._access_log:
            return
        told: dict[str, Any] = {
            "request_id": exchange.request_id,
            "method": scope["method"],
            "path": scope["path"][:_LOGGED_PATH_CHARACTERS],
            "status": exchange.status,
            "ms": round((time.perf_counter() - began_s) * 1e3, 1),
            "bytes": exchange.num_bytes,
            "client": scope["client"][0] if scope.get("client") else None,
        }
        if body is not None:
            told["body"] = body.decode("utf-8", errors="backslashreplace")
        _log.info("request", extra=fields(**told))


_PHASES: Final = {
    "starting": "starting; try again soon",
    "draining": "shutting down; another one may take the request",
    "dead": "ending, since its engine has ended",
}


class _Exchange:
    """A request's two directions, with what is seen of them on the way.

    Attributes:
        status: of the answer; that of a client who left until there is one.
        num_bytes: of the answer's body.
    """

    __slots__ = (
        "_ended",
        "_is_open",
        "_kept",
        "_limit",
        "_receive",
        "_send",
        "_streams",
        "num_bytes",
        "request_id",
        "status",
    )

    def __init__(self, receive: Receive, send: Send, request_id: str, is_open: Callable[[], bool]) -> None:
        self._receive = receive
        self._send = send
        self._is_open = is_open
        self._kept: bytearray | None = None
        self._limit = 0
        self._streams: bool | None = None
        self._ended = False
        self.request_id = request_id
        self.status = CLIENT_CLOSED_REQUEST
        self.num_bytes = 0

    def keep_body(self, most: int) -> bytearray:
        """Keep the first bytes of the request's body; return where."""
        self._limit = most
        self._kept = bytearray()
        return self._kept

    async def receive(self) -> Message:
        """What the client sends."""
        message = await self._receive()
        if self._kept is not None and message["type"] == "http.request":
            self._kept += message.get("body", b"")[: self._limit - len(self._kept)]
        return message

    async def send(self, message: Message) -> None:
        """Answer the client."""
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if not self._is_open():
                headers.append((b"connection", b"close"))
            self.status = message["status"]
            self._streams = any(name == b"content-type" and value.startswith(_EVENTS) for name, value in headers)
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: ApiError, scope: Scope) -> None:
        """Answer with an error, as far as there is still an answer to give.

        A stream that has begun gets it as an event. Any other answer that has begun stays incomplete, which the client
        sees when the server closes the connection.
        """
        if self._ended or self._streams is False:
            return
        content = error_content(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(_TAIL_TIMEOUT_S):
                if self._streams is None:
                    headers = {**error.headers, "content-type": "application/json", "content-length": str(len(content))}
                    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
                    await self.send({"type": "http.response.start", "status": error.status, "headers": raw})
                    await self.send({"type": "http.response.body", "body": content, "more_body": False})
                else:
                    tail = _error_events(error, content, scope)
                    await self.send({"type": "http.response.body", "body": tail, "more_body": False})


def _error_events(error: ApiError, content: bytes, scope: Scope) -> bytes:
    """How a stream ends that was cut off: as the Responses API has it, or as chats and completions do."""
    if scope["path"].endswith("/responses"):
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return named_event("error", msgspec.json.encode(told))
    return event(content) + DONE


def _matching(routes: Sequence[Route], scope: Scope) -> Route | None:
    """The route that serves the request, method included, if one of them does."""
    return next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)


async def _serve(route: Route, scope: Scope, exchange: _Exchange) -> None:
    scope["route"] = route
    await route.handle(scope, exchange.receive, exchange.send)


def _request_id(scope: Scope) -> str:
    """The client's id where it is harmless in a header and a log, else one of ours."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and _SANE_ID.fullmatch(given[0]):
        return bytes(given[0]).decode("ascii")
    return secrets.token_hex(16)
