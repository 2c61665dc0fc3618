"""Where a request ends: :func:`read_head` and :class:`BodyReader` cut HTTP/1.1 messages out of a stream of bytes.

Strict on purpose. Two parsers that see different ends of one message let a client smuggle a request past whatever
stands in front (RFC 9112, section 11.2); so whatever the RFC lets a recipient repair is refused here instead: bare line
feeds, folded lines, two lengths, a length beside chunks, odd encodings. Everything that a client can make long has a
bound. Pure computation on bytes; belongs to one connection.
"""

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["MAX_HEADERS", "MAX_HEAD_BYTES", "BodyReader", "Framing", "RefusalError", "read_head"]

MAX_HEAD_BYTES: Final = 65_536
MAX_HEADERS: Final = 100
MAX_CHUNK_LINE_BYTES: Final = 256
MAX_TRAILER_BYTES: Final = 4096
# Chunks may be small, but not so small that taking them apart is most of the work.
FREE_CHUNK_OVERHEAD_BYTES: Final = 16_384

_REQUEST_LINE: Final = re.compile(rb"[A-Z][A-Z-]{0,31} [!-~]+ HTTP/1\.([01])")
# The white space around a value is taken off afterwards: two repeats that both match it take quadratic time.
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)")
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")


class RefusalError(Exception):
    """A message that is not taken; the connection ends with this answer.

    Args:
        status: of HTTP.
        message: for people.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """How long a request's body is: ``length`` bytes, or in chunks where that is ``None``."""

    length: int | None


def read_head(head: bytes, *, max_body_bytes: int) -> Framing:
    """Check a whole head, the empty line at its end included, and tell how the body is framed.

    Raises:
        RefusalError: it is malformed or ambiguous, or announces a body that is too long.
    """
    first, *lines = head[:-4].split(b"\r\n")
    request_line = _REQUEST_LINE.fullmatch(first)
    if request_line is None:
        raise RefusalError(400, "the request line is malformed")
    if len(lines) > MAX_HEADERS:
        raise RefusalError(431, f"the request has {len(lines)} headers; the limit is {MAX_HEADERS}")
    framing: dict[bytes, list[bytes]] = {b"content-length": [], b"transfer-encoding": [], b"host": []}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            raise RefusalError(400, "a header is malformed")
        name = header[1].lower()
        if name in framing:
            framing[name].append(header[2].strip(b" \t"))
    is_http_1_1 = request_line[1] == b"1"
    if len(framing[b"host"]) != 1 and (is_http_1_1 or framing[b"host"]):
        raise RefusalError(400, "exactly one Host header is needed")
    return _framing(framing[b"content-length"], framing[b"transfer-encoding"], is_http_1_1, max_body_bytes)


def _framing(lengths: list[bytes], encodings: list[bytes], is_http_1_1: bool, max_body_bytes: int) -> Framing:
    if encodings:
        if lengths:
            raise RefusalError(400, "Content-Length and Transfer-Encoding exclude each other")
        if not is_http_1_1 or [value.lower() for value in encodings] != [b"chunked"]:
            raise RefusalError(400, "the only Transfer-Encoding is chunked, in HTTP/1.1")
        return Framing(length=None)
    if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
        raise RefusalError(400, "Content-Length must be one decimal number")
    length = int(lengths[0]) if lengths else 0
    if length > max_body_bytes:
        raise _too_long(max_body_bytes)
    return Framing(length=length)


def _too_long(limit: int) -> RefusalError:
    return RefusalError(413, f"the body is longer than {limit} bytes, the limit of this server")


class BodyReader:
    """Takes one request's body out of what follows its head.

    Args:
        framing: as the head has it.
        max_bytes: longest body.

    Attributes:
        is_complete: all of it, trailers included, has come.
        rest: what came after it.
    """

    __slots__ = (
        "_left",
        "_max_bytes",
        "_num_body",
        "_num_framing",
        "_num_trailer",
        "_pending",
        "_state",
        "is_complete",
        "rest",
    )

    def __init__(self, framing: Framing, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = framing.length or 0
        self._state = "size" if framing.length is None else "length"
        self._pending = b""
        self._num_body = 0
        self._num_framing = 0
        self._num_trailer = 0
        self.is_complete = framing.length == 0
        self.rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the part of the body that ``data`` holds.

        Raises:
            RefusalError: the chunks are malformed, or the body or what frames it is too long.
        """
        if self._state == "length":
            taken = data[: self._left]
            self._left -= len(taken)
            if self._left == 0:
                self._finish(data[len(taken) :])
            return taken
        return self._feed_chunks(self._pending + data)

    def _feed_chunks(self, data: bytes) -> bytes:
        body, position = [], 0
        self._pending = b""
        while position < len(data):
            if self._state == "data":
                taken = data[position : position + self._left]
                body.append(taken)
                position += len(taken)
                self._left -= len(taken)
                self._num_body += len(taken)
                if self._left == 0:
                    self._state = "data end"
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                self._pending = data[position:]
                if len(self._pending) > self._longest_line:
                    raise RefusalError(self._status, "a line between chunks is too long")
                if b"\n" in self._pending:
                    raise RefusalError(400, "a line between chunks ends with a bare line feed")
                break
            is_last = self._line(data[position:end])
            position = end + 2
            if is_last:
                self._finish(data[position:])
                break
        return b"".join(body)

    @property
    def _longest_line(self) -> int:
        return {"size": MAX_CHUNK_LINE_BYTES, "data end": 1, "trailer": MAX_TRAILER_BYTES}[self._state]

    @property
    def _status(self) -> int:
        return 431 if self._state == "trailer" else 400

    def _line(self, line: bytes) -> bool:
        """Take a line that frames chunks, without its end; true if the message ends with it."""
        if len(line) > self._longest_line:
            raise RefusalError(self._status, "a line between chunks is too long")
        if b"\n" in line:
            raise RefusalError(400, "a line between chunks ends with a bare line feed")
        self._num_framing += len(line) + 2
        if self._state == "data end":
            if line:
                raise RefusalError(400, "a chunk is longer than its size says")
            self._state = "size"
        elif self._state == "size":
            self._size(line)
        elif line:
            self._num_trailer += len(line) + 2
            if self._num_trailer > MAX_TRAILER_BYTES:
                raise RefusalError(431, f"the trailer is longer than {MAX_TRAILER_BYTES} bytes")
        else:
            return True
        if self._num_framing > FREE_CHUNK_OVERHEAD_BYTES + self._num_body:
            raise RefusalError(400, "the chunks are too small")
        return False

    def _size(self, line: bytes) -> None:
        size = _CHUNK_LINE.fullmatch(line)
        if size is None:
            raise RefusalError(400, "a chunk's size is malformed")
        self._left = int(size[1], 16)
        if self._num_body + self._left > self._max_bytes:
            raise _too_long(self._max_bytes)
        self._state = "data" if self._left else "trailer"

    def _finish(self, rest: bytes) -> None:
        self.is_complete = True
        self.rest = rest
