"""Open and closed loops: when requests go out, and that a slow server does not change it."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from gapless.bench.serving.arrivals import LoadLevel, poisson_arrivals_s
from gapless.bench.serving.http_client import HttpClient, Origin
from gapless.bench.serving.load import LevelRun, run_level
from gapless.bench.serving.prompts import ServingRequest
from unit.bench.serving.speaking_server import Answer, Handler, Received, Server, serving, text_chunk

REQUESTS = [ServingRequest(path="/completions", body=b'{"n": %d}' % index) for index in range(12)]


async def answer_briefly(answer: Answer) -> None:
    await answer.begin_stream()
    await answer.event(text_chunk("a"))
    await answer.event("[DONE]")
    await answer.end_stream()


def run_on(handler: Handler, use: Callable[[HttpClient, Server], Awaitable[LevelRun]]) -> LevelRun:
    async def both() -> LevelRun:
        async with serving(handler) as server, HttpClient(Origin.parse(server.url)) as client:
            return await use(client, server)

    return asyncio.run(asyncio.wait_for(both(), 60))


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = poisson_arrivals_s(50.0, 20_001, seed=3)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times[0] == 0.0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.median(gaps) == pytest.approx(0.6931 / 50, rel=0.05)
    assert times == poisson_arrivals_s(50.0, 20_001, seed=3)
    assert times != poisson_arrivals_s(50.0, 20_001, seed=4)


def test_arrivals_go_on_while_nobody_is_answered() -> None:
    all_here = asyncio.Event()
    num_here = 0

    async def handler(request: Received, answer: Answer) -> None:
        nonlocal num_here
        num_here += 1
        if num_here == len(REQUESTS):
            all_here.set()
        await all_here.wait()  # a closed loop would wait for an answer here, for ever
        await answer_briefly(answer)

    level = LoadLevel(kind="rate", value=200.0)
    received: list[Received] = []

    async def use(client: HttpClient, server: Server) -> LevelRun:
        run = await run_level(client, level, REQUESTS, seed=5, timeout_s=50)
        received.extend(server.received)
        return run

    run = run_on(handler, use)
    assert [record.failure for record in run.records] == [None] * len(REQUESTS)
    due = [record.scheduled_s - run.records[0].scheduled_s for record in run.records]
    assert due == pytest.approx(poisson_arrivals_s(200.0, len(REQUESTS), seed=5))
    came = {request.json["n"]: request.at_s for request in received}
    for index, record in enumerate(run.records):
        assert came[index] >= record.sent_s >= record.scheduled_s, "never before it is due"
    # Latency counts from the due time, so the first one has waited for the last one's arrival.
    assert run.records[0].ttft_s is not None
    assert run.records[0].ttft_s >= due[-1]


@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_a_closed_loop_keeps_so_many_under_way(concurrency: int) -> None:
    under_way, most = 0, 0

    async def handler(request: Received, answer: Answer) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)
        under_way -= 1
        await answer_briefly(answer)

    async def use(client: HttpClient, server: Server) -> LevelRun:
        level = LoadLevel(kind="concurrency", value=concurrency)
        run = await run_level(client, level, REQUESTS, seed=0, timeout_s=50)
        assert sorted(request.json["n"] for request in server.received) == list(range(len(REQUESTS)))
        assert server.connections <= concurrency, "connections are kept"
        return run

    run = run_on(handler, use)
    assert most == min(concurrency, len(REQUESTS))
    assert all(record.is_complete for record in run.records)
    assert run.seconds >= max(record.end_to_end_s for record in run.records)
    assert 0 < run.client_busy <= 1


def test_failures_do_not_stop_the_others_and_each_is_told() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        if request.json["n"] % 3 == 0:
            await answer.whole(503, {"error": {"message": "busy"}})
        else:
            await answer_briefly(answer)

    told = []

    async def use(client: HttpClient, server: Server) -> LevelRun:
        level = LoadLevel(kind="concurrency", value=4)
        return await run_level(client, level, REQUESTS, seed=0, timeout_s=50, on_done=told.append)

    run = run_on(handler, use)
    assert sum(record.failure == "HTTP 503" for record in run.records) == 4
    assert sum(record.is_complete for record in run.records) == 8
    assert len(told) == len(REQUESTS)


def test_levels_know_how_many_requests_are_useful() -> None:
    assert LoadLevel(kind="rate", value=10).num_requests() == 300
    assert LoadLevel(kind="rate", value=0.1).num_requests() == 16
    assert LoadLevel(kind="concurrency", value=64).num_requests() == 256
    assert LoadLevel(kind="rate", value=2.5).name == "2.5/s"
    assert LoadLevel(kind="concurrency", value=8).name == "8"
