"""The bounded protocol, over raw sockets: each bad request is answered or cut, and the next good one works."""

import re
import resource
import socket
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from fixtures.waiting import until
from gapless.server.http_framing import BodyReader, Framing, RefusalError, read_head
from gapless.server.http_limits import HttpLimits
from unit.server.hostile_messages import CHUNKED, hostile_messages, post
from unit.server.live_server import EchoApp, LiveServer, receive_all, receive_answer, send, status_of

LIMITS = HttpLimits(max_body_bytes=100_000, max_connections=20, head_timeout_s=0.5, body_timeout_s=0.5)
BAD = hostile_messages(LIMITS.max_body_bytes)
GOOD = b"POST /good HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nbody"
GROWTH_MIB = 24


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def running(loop: str) -> Iterator[LiveServer]:
    with LiveServer(EchoApp(), limits=LIMITS, loop=loop, keep_alive_s=1) as server:
        yield server


@pytest.fixture
def app(running: LiveServer) -> EchoApp:
    app: EchoApp = running.app
    app.reset()
    return app


@pytest.fixture
def server(running: LiveServer, app: EchoApp) -> Iterator[LiveServer]:
    yield running
    app.reset()
    with running.connection() as connection:
        send(connection, GOOD)
        assert receive_answer(connection).endswith(b"POST /good 4"), "the next good request works"
    _wait_for_held(running, 0)


@pytest.mark.parametrize("name", BAD)
def test_each_bad_request_is_refused(server: LiveServer, app: EchoApp, name: str) -> None:
    answer = server.exchange(BAD[name].data)
    assert status_of(answer) == BAD[name].status
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing behind it was taken for a request"
    assert b"connection: close" in answer
    assert answer.partition(b"\r\n\r\n")[2].startswith(b'{"error":{"message":')
    assert app.seen == []


GOOD_REQUESTS = {
    "no body": (b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n", b""),
    "HTTP/1.0": (b"GET /x HTTP/1.0\r\n\r\n", b""),
    "length": (post(b"Content-Length: 4", body=b"body"), b"body"),
    "longest body": (post(b"Content-Length: 100000", body=b"a" * 100_000), b"a" * 100_000),
    "chunks": (post(CHUNKED, body=b"2\r\nbo\r\n002\r\ndy\r\n0\r\n\r\n"), b"body"),
    "chunk extensions and a trailer": (
        post(CHUNKED, body=b"4;a=b;c\r\nbody\r\n0;d\r\nAuthorization: Bearer x\r\nB: c\r\n\r\n"),
        b"body",
    ),
    "upper-case spelling": (post(b"TRANSFER-ENCODING: CHUNKED", body=b"4\r\nbody\r\n0\r\n\r\n"), b"body"),
    "an upgrade nobody speaks": (
        post(b"Connection: Upgrade", b"Upgrade: h2c", b"Content-Length: 4", body=b"body"),
        b"body",
    ),
    "longest head": (post(b"A: " + b"a" * 65_000), b""),
    "an empty line before": (b"\r\n\r\n" + post(b"Content-Length: 4", body=b"body"), b"body"),
}


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("name", GOOD_REQUESTS)
def test_good_requests_arrive_whole_however_they_are_split(
    name: str, step: int, app: EchoApp, server: LiveServer
) -> None:
    data, body = GOOD_REQUESTS[name]
    if len(data) > 1000 and step < 1000:
        step = 9973
    with server.connection() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
        assert status_of(receive_answer(connection)) == 200
    assert [seen[2] for seen in app.seen] == [body]
    assert not [name for name, _ in app.headers[0] if name == b"authorization"], "trailers are no headers"


def test_a_head_of_two_hundred_megabytes_costs_no_memory(server: LiveServer) -> None:
    before = _peak_mib()
    with server.connection() as connection:
        sent = send(connection, b"GET / HTTP/1.1\r\nHost: x\r\n")
        for _ in range(200):
            got = send(connection, b"A" * (1 << 20))
            sent += got
            if got < 1 << 20:
                break
        assert status_of(receive_all(connection)) in (431, 0)
    assert _peak_mib() - before < GROWTH_MIB


def test_an_endless_chunked_body_is_cut_at_the_limit(server: LiveServer) -> None:
    before = _peak_mib()
    with server.connection() as connection:
        send(connection, post(CHUNKED))
        chunk = b"8000\r\n" + b"a" * 0x8000 + b"\r\n"
        for _ in range(3000):
            if send(connection, chunk) < len(chunk):
                break
        else:
            pytest.fail("100 MB were taken")
    assert _peak_mib() - before < GROWTH_MIB


@pytest.mark.parametrize(
    "start", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n"], ids=["letter", "line", "headers"]
)
def test_a_head_that_does_not_end_is_cut(server: LiveServer, start: bytes) -> None:
    began_s = time.monotonic()
    with server.connection() as connection:
        connection.sendall(start)
        answer = b""
        while time.monotonic() - began_s < 4:
            time.sleep(0.1)
            if send(connection, b"a") == 0:
                break
            connection.settimeout(0.01)
            try:
                answer += connection.recv(4096)
            except TimeoutError:
                continue
            if answer:
                break
    assert status_of(answer) == 408


def test_a_connection_that_says_nothing_is_closed(server: LiveServer) -> None:
    with server.connection() as connection:
        assert receive_all(connection) == b""


@pytest.mark.parametrize("head", [post(b"Content-Length: 5000"), post(CHUNKED) + b"1388\r\n"], ids=["length", "chunks"])
@pytest.mark.parametrize("trickle", [b"", b"a"], ids=["silence", "trickle"])
def test_a_body_without_progress_is_cut(server: LiveServer, app: EchoApp, head: bytes, trickle: bytes) -> None:
    with server.connection() as connection:
        connection.sendall(head + b"begin")
        answer = b""
        connection.settimeout(0.1)
        for _ in range(40):
            try:
                answer = connection.recv(4096)
                break
            except TimeoutError:
                send(connection, trickle)
    assert status_of(answer) == 408
    assert app.seen == []


def test_a_slow_body_with_progress_is_taken(server: LiveServer, app: EchoApp) -> None:
    with server.connection() as connection:
        connection.sendall(post(b"Content-Length: 20000"))
        for _ in range(10):
            time.sleep(0.12)
            connection.sendall(b"a" * 2000)
        assert status_of(receive_answer(connection)) == 200
    assert len(app.seen[0][2]) == 20_000


def test_a_body_shorter_than_it_says_and_a_longer_one(server: LiveServer, app: EchoApp) -> None:
    short = server.exchange(post(b"Content-Length: 10", body=b"body"))
    assert status_of(short) == 408
    long = server.exchange(post(b"Content-Length: 4", body=b"bodyGARBAGE\r\n\r\n"))
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", long)] == [200, 400]
    assert [seen[2] for seen in app.seen] == [b"body"]


def test_pipelined_requests_are_answered_in_order(server: LiveServer, app: EchoApp) -> None:
    app.delay_s = 0.01
    requests = b"".join(
        b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" % number for number in range(50)
    )
    answer = server.exchange(requests + b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    expected = [b"POST /%d 3" % number for number in range(50)] + [b"GET /last 0"]
    assert re.findall(rb"(?:POST|GET) /\w+ \d", answer) == expected


def test_pipelining_without_end_is_cut(server: LiveServer, app: EchoApp) -> None:
    app.delay_s = 0.2
    one = b"GET /p HTTP/1.1\r\nHost: x\r\n\r\n"
    with server.connection() as connection:
        send(connection, one * 400_000)
        assert status_of(receive_all(connection)) in (0, 400)
    assert len(app.seen) < 10


def test_a_refusal_is_read_although_the_client_goes_on_sending(server: LiveServer) -> None:
    with server.connection() as connection:
        connection.sendall(post(b"Content-Length: 100001"))
        send(connection, b"a" * 5_000_000)
        assert status_of(receive_all(connection)) == 413


def test_expect_continue(server: LiveServer, app: EchoApp) -> None:
    with server.connection() as connection:
        connection.sendall(post(b"Content-Length: 4", b"Expect: 100-continue"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"body")
        assert status_of(receive_answer(connection)) == 200
    with server.connection() as connection:
        connection.sendall(post(b"Content-Length: 100001", b"Expect: 100-continue"))
        assert status_of(receive_all(connection)) == 413, "before the body is sent"


def test_a_body_that_grows_too_long_behind_its_answer_gets_no_second_one(loop: str) -> None:
    async def answer_at_once(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with LiveServer(answer_at_once, limits=LIMITS, loop=loop) as server, server.connection() as connection:
        send(connection, post(CHUNKED) + b"C350\r\n")
        assert status_of(connection.recv(4096)) == 404
        send(connection, b"a" * 50_000 + b"\r\nC351\r\n")
        assert receive_all(connection) == b""


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(server: LiveServer, app: EchoApp) -> None:
    app.delay_s = 1.6
    with server.connection() as connection:
        connection.sendall(GOOD)
        assert status_of(receive_answer(connection)) == 200, "longer than the idle time"
        began_s = time.monotonic()
        assert receive_all(connection) == b""
        assert 0.5 < time.monotonic() - began_s < 4


def test_more_connections_than_the_limit_are_refused(server: LiveServer) -> None:
    held = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(LIMITS.max_connections)]
    try:
        time.sleep(0.1)
        answer = server.exchange(b"")
        assert status_of(answer) == 503
        assert b"retry-after: " in answer
    finally:
        for connection in held:
            connection.close()
    time.sleep(0.1)


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_all_bodies_together_have_a_limit(loop: str, framing: str) -> None:
    app = EchoApp()
    with LiveServer(app, limits=HttpLimits(max_body_bytes=100_000, max_held_body_bytes=150_000), loop=loop) as server:
        chunk = b"186A0\r\n" + b"a" * 100_000 + b"\r\n"
        body = {
            "length": post(b"Content-Length: 100000", body=b"a" * 100_000),
            "chunks": post(CHUNKED, body=chunk + b"0\r\n\r\n"),
        }[framing]
        with server.connection() as first, server.connection() as second:
            app.delay_s = 1.0
            first.sendall(body)
            _wait_for_held(server, 100_000)
            send(second, body)
            refused = receive_all(second)
            assert status_of(refused) == 429
            assert b"retry-after: 1" in refused
            assert b"150000 bytes of bodies, the limit" in refused
            assert _refusals(server, "bodies") == 1
            assert server.memory.num_bytes == 100_000, "of the first only"
            assert receive_answer(first).endswith(b"POST /v1/completions 100000")
            first.sendall(body)
            assert receive_answer(first).endswith(b"POST /v1/completions 100000"), "its memory was given back"
        _wait_for_held(server, 0)


def test_a_client_that_leaves_gives_its_body_back(server: LiveServer) -> None:
    with server.connection() as connection:
        connection.sendall(post(b"Content-Length: 50000", body=b"a" * 30_000))
        _wait_for_held(server, 30_000)
    _wait_for_held(server, 0)


def test_refusals_are_counted(server: LiveServer) -> None:
    before = [_refusals(server, reason) for reason in ("body", "malformed")]
    server.exchange(post(b"Content-Length: 100001"))
    server.exchange(b"nonsense\r\n\r\n")
    after = [_refusals(server, reason) for reason in ("body", "malformed")]
    assert after == [count + 1 for count in before]


def test_whatever_is_taken_ends_where_the_other_parser_ends_it() -> None:
    """What the framing accepts, httptools reads the same way: the same body, and nothing beyond it."""

    class Reader:
        def __init__(self) -> None:
            self.body, self.complete = b"", 0

        def on_body(self, body: bytes) -> None:
            self.body += body

        def on_message_complete(self) -> None:
            self.complete += 1

    for data in [*(message.data for message in BAD.values()), *(data for data, _ in GOOD_REQUESTS.values())]:
        head, separator, rest = data.lstrip(b"\r\n").partition(b"\r\n\r\n")
        try:
            framing = read_head(head + separator, max_body_bytes=100_000)
            body = BodyReader(framing, max_bytes=100_000)
            taken = b"".join(body.feed(rest[i : i + 5]) for i in range(0, len(rest), 5) if not body.is_complete)
        except RefusalError:
            continue
        if not body.is_complete:
            continue
        reader = Reader()
        try:
            httptools.HttpRequestParser(reader).feed_data(data)
        except (httptools.HttpParserUpgrade, httptools.HttpParserError):
            continue
        assert (reader.body, reader.complete) == (taken, 1)


@pytest.mark.parametrize(
    "name",
    [
        *("length and chunks", "chunks and length", "two lengths", "the same length twice", "a list of lengths"),
        *("unknown encoding", "two encodings", "encoding twice", "odd spelling", "chunks in HTTP/1.0", "two Hosts"),
        *("folded header", "space before the colon", "bare line feed in a header", "NUL in a header"),
        *("length with a plus", "empty length"),
    ],
)
def test_an_ambiguous_head_is_refused_by_the_framing_alone(name: str) -> None:
    """Without the second parser, whose strictness is a setting of a library."""
    head = BAD[name].data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    with pytest.raises(RefusalError) as caught:
        read_head(head, max_body_bytes=100_000)
    assert caught.value.status == 400


PIECES = [b"0", b"1", b"3", b"a", b"\r\n", b"\r", b"\n", b";x", b"body", b"A: b", b" ", b"0\r\n\r\n", b"3\r\nabc\r\n"]


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25), cuts=st.lists(st.integers(0, 80), max_size=6))
@example(pieces=[b"0\r\n", b"\n0\r\n\r\n"], cuts=[4])
def test_how_chunks_are_split_changes_nothing(pieces: list[bytes], cuts: list[int]) -> None:
    data = b"".join(pieces)

    def read(parts: list[bytes]) -> tuple[bytes, bytes] | int:
        body = BodyReader(Framing(length=None), max_bytes=20)
        taken = b""
        try:
            for number, part in enumerate(parts):
                taken += body.feed(part)
                if body.is_complete:
                    return taken, body.rest + b"".join(parts[number + 1 :])
        except RefusalError as refusal:
            return refusal.status
        return taken, b"incomplete"

    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    split = [data[start:end] for start, end in pairwise(places)]
    assert read(split) == read([data])
    assert read([data[i : i + 1] for i in range(len(data))]) == read([data])


def test_a_body_reader_leaves_what_is_not_its_own() -> None:
    body = BodyReader(Framing(length=3), max_bytes=10)
    assert (body.feed(b"abcGET"), body.is_complete, body.rest) == (b"abc", True, b"GET")
    chunks = BodyReader(Framing(length=None), max_bytes=10)
    assert chunks.feed(b"3\r\nab") == b"ab"
    assert chunks.feed(b"c\r") == b"c"
    assert (chunks.feed(b"\n0\r\nA: b\r\n\r\nGET"), chunks.is_complete, chunks.rest) == (b"", True, b"GET")


def _wait_for_held(server: LiveServer, num_bytes: int) -> None:
    """Wait until the server holds so many bytes of bodies."""
    until(lambda: server.memory.num_bytes == num_bytes, 10)


def _refusals(server: LiveServer, reason: str) -> float:
    found = re.search(rf'gapless_http_refusals_total{{reason="{reason}"}} (\S+)', server.metrics.expose().decode())
    return float(found[1]) if found else 0.0


def _peak_mib() -> float:
    """The most memory that this process, the server in it, has had."""
    assert Path("/proc/self/status").exists()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
