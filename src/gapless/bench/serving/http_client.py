"""Just enough HTTP/1.1 to load a server with streamed answers: :class:`HttpClient`, on asyncio's streams alone.

A load generator wants to know when bytes arrived and to keep many connections open, and nothing else, so this has no
redirects, cookies or compression. Connections that a response left in a clean state are kept and used again; if the
server closed one meanwhile, the request goes out once more on a fresh one. Belongs to one event loop.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from gapless.errors import ConfigError, GaplessError

__all__ = ["ConnectError", "HttpClient", "HttpError", "HttpResponse", "Origin", "ProtocolError"]

_MAX_HEAD_BYTES: Final = 64 * 1024
_READ_BYTES: Final = 64 * 1024
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class HttpError(GaplessError):
    """A request that got no complete response."""


class ConnectError(HttpError):
    """No connection to the server."""


class ProtocolError(HttpError):
    """The connection broke, or what came over it is not HTTP/1.1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a server is; ``prefix`` comes before every path, and is empty or begins with a slash."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """Read a URL such as ``http://127.0.0.1:8000``, or one that ends in a path.

        Raises:
            ConfigError: it is not a URL of a server.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"url={url!r} cannot be read ({error}): write http://HOST:PORT") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url={url!r} names no server: write http://HOST:PORT or https://HOST")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"url={url!r} must have nothing but a host, a port and a path")
        scheme: Literal["http", "https"] = "https" if parts.scheme == "https" else "http"
        return cls(
            scheme=scheme, host=parts.hostname, port=port or _DEFAULT_PORTS[scheme], prefix=parts.path.rstrip("/")
        )

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


class HttpResponse:
    """A response whose head has been read. :meth:`pieces` gives the body as it arrives, once."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader
        self._is_read = False

    @property
    def leaves_clean_connection(self) -> bool:
        """Whether the next request may use the same connection."""
        framed = "content-length" in self.headers or self._is_chunked
        return self._is_read and framed and self.headers.get("connection", "").lower() != "close"

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body in pieces, each as soon as it is there.

        Raises:
            ProtocolError: the body ends early, or its framing is broken.
        """
        try:
            if self._is_chunked:
                async for piece in self._chunks():
                    yield piece
            elif "content-length" in self.headers:
                async for piece in self._exactly(_number(self.headers["content-length"], 10)):
                    yield piece
            else:
                while piece := await self._reader.read(_READ_BYTES):
                    yield piece
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            raise ProtocolError(f"the connection broke in the middle of an answer ({_cause(error)})") from error
        self._is_read = True

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    @property
    def _is_chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := _number((await self._line()).partition(";")[0], 16):
            async for piece in self._exactly(size):
                yield piece
            if await self._line():
                raise ProtocolError("a chunk of the answer is longer than it says")
        while await self._line():  # trailers
            pass

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await self._reader.read(min(size, _READ_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            size -= len(piece)
            yield piece

    async def _line(self) -> str:
        return (await self._reader.readuntil(b"\r\n")).decode("latin-1").strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpClient:
    """Requests to one server.

    Args:
        origin: the server.
        headers: sent with every request.
        connect_timeout_s: for a new connection, TLS included.
        tls: settings for ``https``; default: the system's certificates are trusted.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        headers: Mapping[str, str] | None = None,
        connect_timeout_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.origin = origin
        self._headers = {"Host": origin.authority, "User-Agent": "gapless-bench", **(headers or {})}
        self._connect_timeout_s = connect_timeout_s
        self._tls = (tls or ssl.create_default_context()) if origin.scheme == "https" else None
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await _close(connection)

    @asynccontextmanager
    async def request(
        self, method: Literal["GET", "POST"], path: str, body: bytes = b""
    ) -> AsyncIterator[HttpResponse]:
        """Send a request; the block runs once the response's head is there, and may leave the body unread.

        Args:
            method: ``POST`` sends ``body`` as JSON.
            path: below the origin's prefix, with a leading slash.
            body: JSON.

        Raises:
            ConnectError: there is no connection to be had.
            ProtocolError: it broke, or what answers is not an HTTP/1.1 server.
        """
        head = self._head(method, path, body)
        connection, response = await self._exchange(head + body)
        try:
            yield response
        finally:
            if response.leaves_clean_connection:
                self._idle.append(connection)
            else:
                await _close(connection)

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        headers = dict(self._headers)
        if method == "POST":
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = [f"{method} {self.origin.prefix}{path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    async def _exchange(self, message: bytes) -> tuple[_Connection, HttpResponse]:
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await _send(connection, message)
            except ProtocolError:
                # Closed while nobody used it: servers do that at any time, and it says nothing about this request.
                await _close(connection)
            except BaseException:
                await _close(connection)
                raise
        connection = await self._connect()
        try:
            return connection, await _send(connection, message)
        except BaseException:
            await _close(connection)
            raise

    async def _connect(self) -> _Connection:
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                reader, writer = await asyncio.open_connection(
                    origin.host, origin.port, ssl=self._tls, limit=_MAX_HEAD_BYTES
                )
        except TimeoutError as error:
            raise ConnectError(
                f"cannot connect to {origin}: no answer within {self._connect_timeout_s:g} s; is the address right?"
            ) from error
        except ssl.SSLError as error:
            raise ConnectError(f"cannot connect to {origin}: {error}; does it speak TLS, and is it trusted?") from error
        except OSError as error:
            raise ConnectError(f"cannot connect to {origin}: {_cause(error)}; is the server running?") from error
        return _Connection(reader=reader, writer=writer)


async def _send(connection: _Connection, message: bytes) -> HttpResponse:
    """Write a request and read the head of what comes back."""
    try:
        connection.writer.write(message)
        await connection.writer.drain()
        while True:
            head = (await connection.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *lines = head.rstrip("\r\n").split("\r\n")
            version, _, rest = status_line.partition(" ")
            if not version.startswith("HTTP/1."):
                raise ProtocolError(f"the server answers {status_line[:60]!r}, which is not HTTP/1.1")
            status = _number(rest[:3], 10)
            if status >= 200:  # below are interim answers, such as 100 Continue
                headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                return HttpResponse(status, headers, connection.reader)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
        raise ProtocolError(f"the connection broke before an answer came ({_cause(error)})") from error


async def _close(connection: _Connection) -> None:
    connection.writer.close()
    try:
        await connection.writer.wait_closed()
    except OSError:
        return  # the other side was faster


def _number(text: str, base: int) -> int:
    try:
        return int(text.strip(), base)
    except ValueError as error:
        raise ProtocolError(f"{text[:40]!r} stands where HTTP/1.1 has a number") from error


def _cause(error: BaseException) -> str:
    match error:
        case asyncio.IncompleteReadError():
            return "the server closed it"
        case asyncio.LimitOverrunError():
            return "a line is too long"
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case _:
            return str(error)
