"""Load at a level: :func:`run_level` sends requests at a rate or so many at once and records each of them.

Open-loop arrivals keep their schedule whatever the server does: a request that is due is sent although others have not
been answered, which is what independent users do. Closed-loop workers send the next request when the last one ended.
The client is one thread with one event loop. How busy it was is part of the result: a client at its limit measures
itself.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gapless.bench.serving.arrivals import LoadLevel, poisson_arrivals_s
from gapless.bench.serving.http_client import HttpClient
from gapless.bench.serving.prompts import ServingRequest
from gapless.bench.serving.sending import RequestRecord, send

__all__ = ["LevelRun", "run_level"]

_SendOne: TypeAlias = Callable[[ServingRequest, float], Awaitable[RequestRecord]]

# The first arrival is a little ahead, so that making the tasks does not delay it.
_LEAD_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelRun:
    """All requests of one level.

    Attributes:
        seconds: from the first request's time to the last one's end.
        client_busy: share of that time in which the client computed, 0 to 1.
    """

    level: LoadLevel
    records: tuple[RequestRecord, ...]
    seconds: float
    client_busy: float


async def run_level(
    client: HttpClient,
    level: LoadLevel,
    requests: Sequence[ServingRequest],
    *,
    seed: int,
    timeout_s: float,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LevelRun:
    """Send every request, wait for all of them.

    Args:
        client: to the server.
        level: how.
        requests: what; in this order.
        seed: of the arrivals.
        timeout_s: for one answer.
        on_done: told of each record as it is made.
    """
    computed_s, start_s = time.process_time(), time.perf_counter()

    async def one(request: ServingRequest, scheduled_s: float) -> RequestRecord:
        record = await send(client, request, scheduled_s=scheduled_s, timeout_s=timeout_s)
        on_done(record)
        return record

    if level.kind == "rate":
        records = await _open_loop(requests, poisson_arrivals_s(level.value, len(requests), seed), one)
    else:
        records = await _closed_loop(requests, int(level.value), one)
    elapsed_s = time.perf_counter() - start_s
    return LevelRun(
        level=level,
        records=tuple(records),
        seconds=max(record.ended_s for record in records) - min(record.scheduled_s for record in records),
        client_busy=min((time.process_time() - computed_s) / elapsed_s, 1.0),
    )


async def _open_loop(
    requests: Sequence[ServingRequest], offsets_s: Sequence[float], one: _SendOne
) -> list[RequestRecord]:
    start_s = time.perf_counter() + _LEAD_S

    async def at(request: ServingRequest, due_s: float) -> RequestRecord:
        await asyncio.sleep(due_s - time.perf_counter())
        return await one(request, due_s)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at(*each)) for each in zip(requests, (start_s + o for o in offsets_s), strict=True)]
    return [task.result() for task in tasks]


async def _closed_loop(requests: Sequence[ServingRequest], concurrency: int, one: _SendOne) -> list[RequestRecord]:
    waiting = iter(requests)

    async def worker() -> list[RequestRecord]:
        return [await one(request, time.perf_counter()) for request in waiting]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker()) for _ in range(min(concurrency, len(requests)))]
    return [record for task in tasks for record in task.result()]
