"""A crowd passes the gate little by little, in order, and does not hold up anybody else."""

import asyncio
from contextlib import suppress

from gapless.server.limits import RequestGate


def test_a_crowd_is_let_in_little_by_little() -> None:
    async def everything() -> None:
        gate = RequestGate(max_concurrent=1000)
        entered: list[int] = []

        async def request(number: int) -> None:
            async with gate.turn():
                entered.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(200)]
        most, turns = 0, 0
        while len(entered) < 200:
            before = len(entered)
            await asyncio.sleep(0)  # one turn of the loop
            most, turns = max(most, len(entered) - before), turns + 1
        assert entered == list(range(200))
        assert most <= 8, "this many kept everybody else waiting"
        assert turns < 200, "and a lonely request does not wait"
        await asyncio.gather(*tasks)
        assert gate.num_running == 0

    asyncio.run(everything())


def test_those_who_leave_while_they_wait_take_nobodys_turn() -> None:
    async def everything() -> None:
        gate = RequestGate(max_concurrent=1000)
        entered: list[int] = []

        async def request(number: int) -> None:
            async with gate.turn():
                entered.append(number)

        tasks = [asyncio.create_task(request(number)) for number in range(100)]
        await asyncio.sleep(0)
        assert gate.num_running > 50, "who waits is counted"
        for task in tasks[10:90]:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
        assert [number for number in entered if number >= 90] == list(range(90, 100))
        assert gate.num_running == 0
        assert await gate.until_idle(1)

    asyncio.run(everything())


def test_a_deadline_counts_while_a_request_waits() -> None:
    async def everything() -> None:
        gate = RequestGate(max_concurrent=1000)
        ended = []

        async def request() -> None:
            try:
                async with gate.turn():
                    pass
            except TimeoutError:
                ended.append(1)

        tasks = [asyncio.create_task(request()) for _ in range(100)]
        await asyncio.sleep(0)
        gate.end_all()
        await asyncio.gather(*tasks)
        assert len(ended) > 50
        assert gate.num_running == 0

    asyncio.run(everything())
