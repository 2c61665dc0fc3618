"""Clients that misbehave: they leave at any moment, are killed, send nonsense, or read and write slowly.

Each function is one client from its connection to its end, and returns nothing: whether the server took it well shows
in its counters and in the answers of others. Those that must be answered in a certain way raise
:class:`MisansweredError`. All are used in one event loop.
"""

import asyncio
import json
import random
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

from good_requests import Choice, GoodRequest, choices_of

from gapless.bench.serving.event_stream import EventStream

UnfriendlyClient: TypeAlias = Callable[[int, random.Random, GoodRequest], Coroutine[Any, Any, None]]

_ENDLESS: Final = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0.0}
_PROMPT: Final = "a long story about the sea, told by somebody who may leave at any time"
_PATIENCE_S: Final = 60.0


class MisansweredError(Exception):
    """The server did something that it must not do."""


async def leaves_in_the_head(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Goes before its head is complete."""
    message = _message("/v1/completions", b"{}")
    async with _connection(port, draw) as (_, writer):
        writer.write(message[: draw.randrange(message.index(b"\r\n\r\n") + 3)])
        await asyncio.sleep(draw.uniform(0, 0.2))


async def leaves_in_the_body(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Goes before its body is complete."""
    body = json.dumps({"prompt": _PROMPT * draw.randint(1, 2000), "max_tokens": 3}).encode()
    message = _message("/v1/completions", body)
    async with _connection(port, draw) as (_, writer):
        writer.write(message[: -draw.randrange(1, len(body))])
        await asyncio.sleep(draw.uniform(0, 0.3))


async def leaves_before_the_answer(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Sends a whole request and goes: at once, while it is queued, or while it runs."""
    fields = {**_ENDLESS, "n": draw.choice([1, 1, 4]), "stream": draw.random() < 0.5}
    prompt: Any = [_PROMPT, _PROMPT + "!"] if draw.random() < 0.2 else _PROMPT * draw.randint(1, 8)
    async with _connection(port, draw) as (_, writer):
        writer.write(_message("/v1/completions", json.dumps({"prompt": prompt, **fields}).encode()))
        await asyncio.sleep(draw.choice([0.0, draw.uniform(0, 0.05), draw.uniform(0, 1.0)]))


async def leaves_in_the_stream(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Reads some of a stream and goes."""
    path, fields = draw.choice(
        [
            ("/v1/completions", {"prompt": _PROMPT, "logprobs": 3, "n": 2}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": _PROMPT}]}),
        ]
    )
    async with _connection(port, draw) as (reader, writer):
        writer.write(_message(path, json.dumps({**_ENDLESS, **fields, "stream": True}).encode()))
        for _ in range(draw.randrange(1, 40)):
            if not await reader.read(draw.choice([1, 100, 10_000])):
                return


async def is_killed(port: int, draw: random.Random, good: GoodRequest) -> None:
    """A process that has requests at several stages, and is killed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", _KILLED_PROCESS, str(port)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), _PATIENCE_S)
        await asyncio.sleep(draw.uniform(0, 1.0))
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


_KILLED_PROCESS: Final = """
import json, socket, sys, time
body = json.dumps({"prompt": "nobody will read all of this", "max_tokens": 1500, "ignore_eos": True, "stream": True})
message = ("POST /v1/completions HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nContent-Type: application/json\\r\\n"
           f"Content-Length: {len(body)}\\r\\n\\r\\n{body}").encode()
parts = [message[:40], message[:-20], message, message]
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in parts]
for connection, part in zip(connections, parts):
    connection.sendall(part)
connections[-1].recv(200)
print("running", flush=True)
time.sleep(60)
"""


_NONSENSE: Final[tuple[tuple[str, bytes], ...]] = tuple(
    (path, body if isinstance(body, bytes) else json.dumps(body).encode())
    for path, body in (
        ("/v1/completions", b""),
        ("/v1/completions", b"{"),
        ("/v1/completions", b"\xff\xfe\x00"),
        ("/v1/completions", b"[" * 5000),
        ("/v1/completions", b'{"prompt": "x", "temperature": NaN}'),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
        ("/v1/completions", {"prompt": "x", "temprature": 1}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": [10**9]}),
        ("/v1/completions", {"prompt": "x" * 100_000}),
        ("/v1/completions", {"prompt": ["good", [7, 99_999]], "max_tokens": 5}),
        ("/v1/completions", {"prompt": "x", "n": 1000}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1000}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"x": 1}}),
        ("/v1/completions", {"prompt": "x", "model": "no-such-model"}),
        ("/v1/completions", {"prompt": "x", "stop": ["a"] * 1000}),
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}),
        ("/v1/responses", {"input": None}),
        ("/v1/no/such/route", {}),
        ("/tokenize", {"prompt": 1}),
        ("/detokenize", {"tokens": [-1]}),
    )
)


async def sends_nonsense(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Bodies that are no request: answered with 4xx and the error's form."""
    path, body = draw.choice(_NONSENSE)
    async with _connection(port, draw) as (reader, writer):
        writer.write(_message(path, body))
        status, answer = await _whole(reader)
    error = json.loads(answer).get("error", {})
    if not 400 <= status < 500 or set(error) != {"message", "type", "param", "code"}:
        raise MisansweredError(f"{path} {body[:80]!r} is answered with {status} {answer[:300]!r}")


async def sends_slowly(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Sends its head, or its body, a byte at a time: cut off with 408, or closed."""
    message = _message("/v1/completions", json.dumps({"prompt": _PROMPT * 100, "max_tokens": 3}).encode())
    at_once = draw.choice([0, message.index(b"\r\n\r\n") + 4])
    async with _connection(port, draw) as (reader, writer):
        writer.write(message[:at_once])
        answer = asyncio.ensure_future(_whole(reader))
        for place in range(at_once, at_once + 200):
            writer.write(message[place : place + 1])
            await asyncio.wait([answer], timeout=0.1)
            if answer.done():
                break
        status, _ = await answer
    if status not in (0, 408):
        raise MisansweredError(f"a slow sender is answered with {status}")


async def reads_slowly(port: int, draw: random.Random, good: GoodRequest) -> None:
    """Takes its stream in sips through a narrow window, and must get all of it."""
    body = json.dumps({**good.body, "stream": True}).encode()
    async with _connection(port, draw, receive_buffer=4096, keep=True) as (reader, writer):
        writer.write(_message(good.path, body))
        await asyncio.sleep(draw.uniform(0, 2.0))
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            piece = await asyncio.wait_for(reader.read(draw.choice([64, 512, 4096])), _PATIENCE_S)
            if not piece:
                raise MisansweredError(f"a slow reader is cut off after {data[-200:]!r}")
            data += piece
            if b'"code":"' in data and data.startswith(b"HTTP/1.1 429"):
                return
            await asyncio.sleep(draw.uniform(0, 0.02))
    answer = streamed(data)
    if [(each.text, each.finish_reason) for each in answer] != [(e.text, e.finish_reason) for e in good.answer]:
        raise MisansweredError(f"a slow reader got {answer} instead of {good.answer}")


def streamed(data: bytes) -> tuple[Choice, ...]:
    """The choices in a chunked answer with events."""
    rest, content = data.partition(b"\r\n\r\n")[2], b""
    while size := int(rest.partition(b"\r\n")[0], 16):
        start = rest.index(b"\r\n") + 2
        content += rest[start : start + size]
        rest = rest[start + size + 2 :]
    events = EventStream().feed(content)
    return choices_of(json.loads(event) for event in events if event != "[DONE]")


async def _whole(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of an answer that closes its connection; status 0 if there was none."""
    try:
        data = await asyncio.wait_for(reader.read(-1), _PATIENCE_S)
    except ConnectionError:
        return 0, b""
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]) if head else 0), body


def _message(path: str, body: bytes) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", "Connection: close"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@asynccontextmanager
async def _connection(
    port: int, draw: random.Random, *, receive_buffer: int | None = None, keep: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that ends as clients do that leave: closed, reset, or half closed first."""
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    how = "close" if keep else draw.choice(["close", "reset", "half close"])
    reader, writer = await asyncio.open_connection(sock=raw, limit=4096 if receive_buffer else 1 << 16)
    try:
        yield reader, writer
        if how == "half close" and not writer.is_closing():
            writer.write_eof()
            await asyncio.sleep(draw.uniform(0, 0.2))
    except (ConnectionError, asyncio.IncompleteReadError):
        if keep:
            raise
    finally:
        if how == "reset":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()


CLIENTS: Final[dict[str, UnfriendlyClient]] = {
    "leaves in the head": leaves_in_the_head,
    "leaves in the body": leaves_in_the_body,
    "leaves before the answer": leaves_before_the_answer,
    "leaves in the stream": leaves_in_the_stream,
    "is killed": is_killed,
    "sends nonsense": sends_nonsense,
    "sends slowly": sends_slowly,
    "reads slowly": reads_slowly,
}
