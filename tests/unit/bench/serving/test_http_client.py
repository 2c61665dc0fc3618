"""The HTTP client against a server that writes every byte itself."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from gapless.bench.serving.http_client import ConnectError, HttpClient, Origin, ProtocolError
from gapless.errors import ConfigError
from unit.bench.serving.speaking_server import Answer, Handler, Received, Server, serving


def run(handler: Handler, use: Callable[[HttpClient, Server], Awaitable[None]]) -> None:
    async def both() -> None:
        async with serving(handler) as server, HttpClient(Origin.parse(server.url)) as client:
            await use(client, server)

    asyncio.run(asyncio.wait_for(both(), 30))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://example.org", "https://example.org"),
        ("https://example.org:443/a/b", "https://example.org/a/b"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_origins_are_read_and_shown(url: str, shown: str) -> None:
    assert str(Origin.parse(url)) == shown


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://x:port", "http://x:99999", "http://u@x", "http://x/?a=1"]
)
def test_other_urls_are_refused_with_the_value(url: str) -> None:
    with pytest.raises(ConfigError, match="url="):
        Origin.parse(url)


def test_what_is_sent() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.whole(200, b"{}")

    async def use(client: HttpClient, server: Server) -> None:
        async with client.request("POST", "/v1/x", b'{"a": 1}') as response:
            assert await response.body() == b"{}"
        async with client.request("GET", "/v1/models") as response:
            await response.body()
        post, get = server.received
        assert (post.method, post.path, post.json) == ("POST", "/v1/x", {"a": 1})
        assert post.headers["content-type"] == "application/json"
        assert post.headers["host"] == server.url.removeprefix("http://")
        assert (get.method, get.body) == ("GET", b"")
        assert "content-length" not in get.headers

    run(handler, use)


def test_chunks_come_as_they_are_sent_however_they_are_cut() -> None:
    body = bytes(range(256)) * 3
    pieces = [body[:1], body[1:300], body[300:]]

    async def handler(request: Received, answer: Answer) -> None:
        await answer.begin_stream()
        wire = b"".join(b"%X;name=value\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
        wire += b"0\r\nTrailer: 1\r\n\r\n"
        for begin in range(0, len(wire), 7):
            await answer.raw(wire[begin : begin + 7])
            await asyncio.sleep(0)

    async def use(client: HttpClient, server: Server) -> None:
        for _ in range(2):
            async with client.request("POST", "/", b"{}") as response:
                assert await response.body() == body
        assert server.connections == 1

    run(handler, use)


def test_a_piece_is_there_before_the_next_one_is_sent() -> None:
    seen = asyncio.Event()

    async def handler(request: Received, answer: Answer) -> None:
        await answer.begin_stream()
        await answer.chunk(b"first")
        await seen.wait()
        await answer.chunk(b"second")
        await answer.end_stream()

    async def use(client: HttpClient, server: Server) -> None:
        got = []
        async with client.request("POST", "/", b"{}") as response:
            async for piece in response.pieces():
                got.append(piece)
                seen.set()
        assert got == [b"first", b"second"]

    run(handler, use)


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.raw(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        await answer.break_off()

    async def use(client: HttpClient, server: Server) -> None:
        for _ in range(2):
            async with client.request("GET", "/") as response:
                assert await response.body() == b"until the end"
        assert server.connections == 2

    run(handler, use)


def test_connections_are_used_again_unless_something_was_left_unread() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.whole(200, b"x" * 10, extra="Connection: close\r\n" if request.path == "/close" else "")

    async def get(client: HttpClient, path: str, *, read: bool) -> None:
        async with client.request("GET", path) as response:
            if read:
                await response.body()

    async def use(client: HttpClient, server: Server) -> None:
        await get(client, "/", read=True)
        await get(client, "/", read=True)
        assert server.connections == 1
        await get(client, "/", read=False)
        await get(client, "/close", read=True)
        await get(client, "/", read=True)
        assert server.connections == 3
        assert len(server.received) == 5, "nothing was sent where an answer lay unread"

    run(handler, use)


def test_an_idle_connection_that_the_server_closed_is_no_failure() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.whole(200, b"fine")
        await answer.break_off()

    async def use(client: HttpClient, server: Server) -> None:
        for _ in range(3):
            async with client.request("GET", "/") as response:
                assert await response.body() == b"fine"
            await asyncio.sleep(0.02)
        assert len(server.received) == 3

    run(handler, use)


def test_interim_answers_are_passed_over() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
        await answer.whole(429, b"later")

    async def use(client: HttpClient, server: Server) -> None:
        async with client.request("POST", "/", b"{}") as response:
            assert response.status == 429
            assert await response.body() == b"later"

    run(handler, use)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "before an answer came"),
        (b"HTTP/1.1 200 OK\r\nContent-", "before an answer came"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 what\r\n\r\n", "has a number"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "in the middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc", "in the middle of an answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "has a number"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than it says"),
    ],
)
def test_broken_answers_say_what_is_wrong(sent: bytes, message: str) -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.raw(sent)
        await answer.break_off()

    async def use(client: HttpClient, server: Server) -> None:
        with pytest.raises(ProtocolError, match=message):
            async with client.request("GET", "/") as response:
                await response.body()

    run(handler, use)


def test_a_refused_connection_names_the_address() -> None:
    async def unused_url() -> str:
        async def handler(request: Received, answer: Answer) -> None:
            raise AssertionError("nobody asks")

        async with serving(handler) as server:
            return server.url

    async def use() -> None:
        url = await unused_url()
        async with HttpClient(Origin.parse(url)) as client:
            with pytest.raises(ConnectError, match=f"cannot connect to {url}: .*; is the server running"):
                async with client.request("GET", "/"):
                    pass

    asyncio.run(use())


def test_a_server_that_does_not_answer_the_call_is_given_up() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        raise AssertionError("nothing but a request for TLS comes")

    async def use() -> None:
        async with serving(handler) as server:
            origin = Origin.parse(server.url.replace("http://", "https://"))
            async with HttpClient(origin, connect_timeout_s=0.2) as client:
                with pytest.raises(ConnectError, match=f"cannot connect to {origin}: no answer within 0.2 s"):
                    async with client.request("GET", "/"):
                        pass

    asyncio.run(asyncio.wait_for(use(), 30))
