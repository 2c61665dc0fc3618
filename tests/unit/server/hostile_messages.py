"""Requests on the wire that are no request, or two: :func:`hostile_messages`, each of which must be refused.

Heads, framings, chunks and trailers that a lenient parser repairs, and that another one reads in another way; and those
that never end. Bytes rather than fields: no client library would send them.
"""

from dataclasses import dataclass

__all__ = ["CHUNKED", "HostileMessage", "hostile_messages", "post"]

CHUNKED = b"Transfer-Encoding: chunked"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileMessage:
    """Bytes for a connection of their own, and the status of the one answer to them."""

    data: bytes
    status: int


def post(*lines: bytes, body: bytes = b"") -> bytes:
    """A POST of JSON to a route of the API with further header lines and a body, as they are."""
    first = (b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Content-Type: application/json")
    return b"\r\n".join((*first, *lines, b"", b"")) + body


def hostile_messages(max_body_bytes: int) -> dict[str, HostileMessage]:
    """All of them, by name, for a server that takes bodies of so many bytes."""
    too_long = (
        b"%X\r\n" % (max_body_bytes // 2) + b"a" * (max_body_bytes // 2) + b"\r\n%X\r\n" % (max_body_bytes // 2 + 1)
    )
    messages: dict[str, tuple[bytes, int]] = {
        "no HTTP": (b"hello\r\n\r\n", 400),
        "HTTP/0.9": (b"GET /\r\n\r\n", 400),
        "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n", 400),
        "lower-case method": (b"get / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "unknown method": (b"FROB / HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "space in the target": (b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "NUL in the target": (b"GET /a\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "non-ASCII target": (b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "target without a path": (b"GET x HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "CONNECT": (b"CONNECT evil:443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        "no Host": (b"GET / HTTP/1.1\r\n\r\n", 400),
        "two Hosts": (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        "NUL in a header": (post(b"A: b\x00c"), 400),
        "folded header": (post(b"A: b\r\n c"), 400),
        "folded first header": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", 400),
        "space before the colon": (post(b"Content-Length : 3"), 400),
        "header without a colon": (post(b"nonsense"), 400),
        "header without a name": (post(b": x"), 400),
        "bare line feeds": (b"POST /x HTTP/1.1\nHost: x\nContent-Length: 1\n\na\r\n\r\n", 400),
        "bare line feed in a header": (post(b"A: b\nContent-Length: 5"), 400),
        "bare carriage return": (post(b"A: b\rC: d"), 400),
        "long URL": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        "long header": (post(b"A: " + b"a" * 70_000), 431),
        "many headers": (post(*(b"A%d: b" % number for number in range(101))), 431),
        "many long headers": (post(*(b"A%d: %s" % (number, b"b" * 1000) for number in range(99))), 431),
        "negative length": (post(b"Content-Length: -1"), 400),
        "length with a plus": (post(b"Content-Length: +4", body=b"body"), 400),
        "hexadecimal length": (post(b"Content-Length: 0x4", body=b"body"), 400),
        "length in words": (post(b"Content-Length: four", body=b"body"), 400),
        "empty length": (post(b"Content-Length:", body=b"body"), 400),
        "two lengths": (post(b"Content-Length: 4", b"Content-Length: 5", body=b"body!"), 400),
        "the same length twice": (post(b"Content-Length: 4", b"Content-Length: 4", body=b"body"), 400),
        "a list of lengths": (post(b"Content-Length: 4, 4", body=b"body"), 400),
        "huge length": (post(b"Content-Length: %d" % (max_body_bytes + 1)), 413),
        "length beyond 64 bits": (post(b"Content-Length: 99999999999999999999"), 400),
        "length and chunks": (
            post(b"Content-Length: 4", CHUNKED, body=b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"),
            400,
        ),
        "chunks and length": (
            post(CHUNKED, b"Content-Length: 4", body=b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n"),
            400,
        ),
        "unknown encoding": (post(b"Transfer-Encoding: gzip", body=b"0\r\n\r\n"), 400),
        "two encodings": (post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), 400),
        "encoding twice": (post(CHUNKED, CHUNKED, body=b"0\r\n\r\n"), 400),
        "odd spelling": (post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"), 400),
        "vertical tab": (post(b"Transfer-Encoding: \x0bchunked", body=b"0\r\n\r\n"), 400),
        "chunks in HTTP/1.0": (b"POST /x HTTP/1.0\r\nHost: x\r\n" + CHUNKED + b"\r\n\r\n0\r\n\r\n", 400),
        "chunk size in words": (post(CHUNKED, body=b"four\r\nbody\r\n0\r\n\r\n"), 400),
        "negative chunk": (post(CHUNKED, body=b"-4\r\nbody\r\n0\r\n\r\n"), 400),
        "chunk size 0x4": (post(CHUNKED, body=b"0x4\r\nbody\r\n0\r\n\r\n"), 400),
        "empty chunk size": (post(CHUNKED, body=b"\r\nbody\r\n0\r\n\r\n"), 400),
        "overflowing chunk size": (post(CHUNKED, body=b"FFFFFFFFFFFFFFFF1\r\nbody\r\n0\r\n\r\n"), 400),
        "huge chunk": (post(CHUNKED, body=b"FFFFFFFF\r\nbody"), 413),
        "chunks beyond the limit": (post(CHUNKED, body=too_long), 413),
        "chunk longer than its size": (post(CHUNKED, body=b"3\r\nbody\r\n0\r\n\r\n"), 400),
        "bare line feed after a size": (post(CHUNKED, body=b"4\nbody\n0\n\n"), 400),
        "long chunk extension": (post(CHUNKED, body=b"4;" + b"x" * 300 + b"\r\nbody\r\n0\r\n\r\n"), 400),
        "endless chunk extension": (post(CHUNKED, body=b"4;" + b"x" * 1_000_000), 400),
        "endless chunk size": (post(CHUNKED, body=b"0" * 1_000_000), 400),
        "many tiny chunks": (post(CHUNKED, body=b"1\r\na\r\n" * 20_000), 400),
        "long trailer": (post(CHUNKED, body=b"0\r\nA: " + b"x" * 5000 + b"\r\n\r\n"), 431),
        "endless trailer": (post(CHUNKED, body=b"0\r\n" + b"A: b\r\n" * 100_000), 431),
        "endless trailer line": (post(CHUNKED, body=b"0\r\nA: " + b"x" * 1_000_000), 431),
    }
    return {name: HostileMessage(data=data, status=status) for name, (data, status) in messages.items()}
