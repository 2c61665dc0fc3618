"""``gapless serve`` under crowds and unfriendly clients: right answers, nothing left behind.

Short versions of ``benchmarks/server/soak.py`` and ``many_streams.py``, with their clients.
"""

import asyncio
import json
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from e2e.served_process import Served, gone, served
from gapless.bench.serving.http_client import HttpClient, HttpError, Origin

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "server"))

from good_requests import GoodRequest, Result, draw_requests, learn, send
from health_probe import HealthProbe
from server_process import metrics_of, total, usage_of
from unfriendly_clients import CLIENTS, streamed

ENDLESS = 100_000
HEALTH_WITHIN_MS = 500
SMALL = ["tiny-llama", "--load-format", "dummy", "--device", "cpu", "--port", "0", "--max-rows", "16"]


def origin_of(server: Served) -> Origin:
    return Origin.parse(f"http://127.0.0.1:{server.port}")


class Crowd:
    """A server, requests whose answers are known, and what the server held before anybody came."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.known: list[GoodRequest] = asyncio.run(self._learn())
        self.at_first = asyncio.run(self.idle())

    async def _learn(self) -> list[GoodRequest]:
        async with HttpClient(origin_of(self.server)) as http:
            return await learn(http, draw_requests(10, seed=1, max_tokens=24, printable=True))

    async def idle(self) -> list[int]:
        """Descriptors of both processes, once nothing runs and nobody else is connected."""
        deadline_s = time.monotonic() + 30
        async with HttpClient(origin_of(self.server)) as http:
            while True:
                metrics = await metrics_of(http)
                busy = [
                    metrics["requests_running"],
                    metrics["requests_waiting"],
                    metrics["http_requests_in_progress"],
                    total(metrics, "kv_cache_blocks", "used"),
                    metrics["http_connections"] - 1,
                ]
                if not any(busy):
                    assert not total(metrics, "http_requests_total", 'status="5')
                    return [usage_of(process.pid).descriptors for process in self.server.family()]
                assert time.monotonic() < deadline_s, f"it does not become idle: {busy}"
                await asyncio.sleep(0.1)

    async def streams(self, count: int) -> Counter[str]:
        """So many at once; by outcome."""
        async with HttpClient(origin_of(self.server), connect_timeout_s=60) as http:
            requests = [self.known[number % len(self.known)] for number in range(count)]
            results = await asyncio.gather(*(send(http, request, stream=True) for request in requests))
        assert not [each.detail for each in results if each.outcome == "wrong"]
        return Counter(each.outcome for each in results)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    arguments = [*SMALL, "--num-blocks", "192", "--max-waiting", "150", "--token-budget", "256"]
    with served(tmp_path_factory.mktemp("crowd") / "log", *arguments) as server:
        server.wait_until_ready()
        yield Crowd(server)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert "Traceback" not in server.told


def test_c63_two_hundred_streams_end_or_are_refused_and_leave_nothing(crowd: Crowd) -> None:
    with HealthProbe(crowd.server.port) as probe:
        outcomes = asyncio.run(crowd.streams(100)) + asyncio.run(crowd.streams(300))
    assert outcomes["right"] >= 250
    assert outcomes["right"] + outcomes["refused for load"] == 400
    assert outcomes["refused for load"] > 0, "300 choices and more are too many for 16 rows and 150 places"
    assert asyncio.run(crowd.idle()) == crowd.at_first
    assert {answer.status for answer in probe.answers} == {200}
    slowest_ms = max(answer.latency_ms for answer in probe.answers)
    print(f"the slowest answer of /health: {slowest_ms:.0f} ms")
    assert slowest_ms < HEALTH_WITHIN_MS


def test_unfriendly_clients_leave_nothing_and_hurt_nobody(crowd: Crowd) -> None:
    async def everything() -> Counter[str]:
        draw = random.Random(3)

        async def unfriendly(client: Callable[..., Awaitable[None]], seed: int) -> None:
            own = random.Random(seed)
            for _ in range(3):
                await client(crowd.server.port, own, own.choice(crowd.known))

        async def good() -> Counter[str]:
            outcomes: Counter[str] = Counter()
            async with HttpClient(origin_of(crowd.server)) as http:
                for _ in range(20):
                    result = await send(http, draw.choice(crowd.known), stream=draw.random() < 0.5)
                    assert result.outcome != "wrong", result.detail
                    outcomes[result.outcome] += 1
            return outcomes

        clients = [client for name, client in CLIENTS.items() if name != "sends slowly"]
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(CLIENTS["sends slowly"](crowd.server.port, draw, crowd.known[0]))
            for seed, client in enumerate(clients * 2):
                group.create_task(unfriendly(client, seed))
            neighbours = [group.create_task(good()) for _ in range(3)]
        return sum((task.result() for task in neighbours), Counter[str]())

    with HealthProbe(crowd.server.port) as probe:
        outcomes = asyncio.run(everything())
    assert outcomes["right"] >= 50
    assert asyncio.run(crowd.idle()) == crowd.at_first
    assert {answer.status for answer in probe.answers} == {200}
    slowest_ms = max(answer.latency_ms for answer in probe.answers)
    print(f"the slowest answer of /health: {slowest_ms:.0f} ms")
    assert slowest_ms < HEALTH_WITHIN_MS


def test_a_reader_that_stalls_gets_all_of_its_text_and_holds_up_nobody(crowd: Crowd) -> None:
    # Eight choices with twenty log-probs a token: megabytes that somebody has to keep meanwhile.
    fields = {"prompt": "a stalled reader", "n": 8, "seed": 5, "max_tokens": 300, "logprobs": 20, "ignore_eos": True}
    status, right = crowd.server.ask("POST", "/v1/completions", fields)
    assert status == 200
    body = json.dumps({**fields, "stream": True})
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", crowd.server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
        wait_until_it_runs(crowd.server, runs=True)
        wait_until_it_runs(crowd.server, runs=False)  # the engine does not wait for a reader
        data = b""
        while piece := connection.recv(1 << 16):
            data += piece
    answer = streamed(data)
    assert [each.text for each in answer] == [choice["text"] for choice in right["choices"]]
    assert [len(each.logprobs) for each in answer] == [300] * 8
    assert {each.finish_reason for each in answer} == {"length"}
    assert asyncio.run(crowd.idle()) == crowd.at_first


def wait_until_it_runs(server: Served, *, runs: bool) -> None:
    deadline_s = time.monotonic() + 60
    while ("\ngapless_requests_running 0.0\n" in server.ask("GET", "/metrics")[1]) is runs:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_c65_sigterm_in_a_crowd_ends_every_request_one_way_or_the_other(tmp_path: Path) -> None:
    with served(tmp_path / "log", *SMALL, "--num-blocks", "192") as server:
        server.wait_until_ready()
        family = server.family()
        crowd = Crowd(server)

        async def everything() -> list[Result | HttpError]:
            async def one(number: int) -> Result | HttpError:
                await asyncio.sleep(number * 0.01)
                async with HttpClient(origin_of(server)) as http:
                    try:
                        return await send(http, crowd.known[number % len(crowd.known)], stream=number % 2 == 0)
                    except HttpError as error:
                        return error

            async with asyncio.timeout(60):
                tasks = [asyncio.create_task(one(number)) for number in range(80)]
                leaving = CLIENTS["leaves in the stream"]
                others = [asyncio.create_task(leaving(server.port, random.Random(n), crowd.known[0])) for n in range(5)]
                await asyncio.sleep(0.4)
                server.signal(signal.SIGTERM)
                await asyncio.gather(*others, return_exceptions=True)
                return await asyncio.gather(*tasks)

        ends = Counter(end_of(each) for each in asyncio.run(everything()))
        assert ends["right"] >= 10
        assert ends["refused"] + ends["no connection"] >= 10, "those that came after the signal"
        assert sum(ends.values()) == 80
        assert set(ends) <= {"right", "refused", "no connection"}, ends
        assert server.end() == 0
        assert gone(family, 2)
        assert "Traceback" not in server.told


def end_of(result: Result | HttpError) -> str:
    """How a request ended; one that was accepted may not lose its connection."""
    if isinstance(result, HttpError):
        return "no connection" if "connect" in str(result) or "before an answer" in str(result) else str(result)
    if result.outcome == "wrong" and result.detail.startswith("503") and "draining" in result.detail:
        return "refused"
    return result.outcome if result.outcome == "right" else result.detail
