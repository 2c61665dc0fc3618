"""How many requests run at once, and how they end when they must: :class:`RequestGate`.

Every request that can make work (each POST) passes the gate. It counts them, refuses more than its limit and, when the
server drains, all of them; it lets a crowd in little by little, and ends those that outlive their deadline or the
drain. Ending means cancelling the task: closing its generators is what aborts a generation. Belongs to the event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

__all__ = ["GatePhase", "RequestGate", "Turn"]

GatePhase = Literal["starting", "open", "draining", "dead"]

# To read a request and hand it to the engine takes about a millisecond.
_STARTS_A_TURN: Final = 4


class Turn:
    """One request's stay behind the gate.

    Attributes:
        ended_by: what cut it off, if not its deadline.
    """

    __slots__ = ("_timeout", "ended_by")

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self.ended_by: Literal["shutdown"] | None = None

    @property
    def was_cut_off(self) -> bool:
        """Whether it was ended here, by its deadline or by :meth:`end`."""
        return self._timeout.expired()

    def end(self, reason: Literal["shutdown"]) -> None:
        """Cut the request off now."""
        if self.ended_by is None and not self.was_cut_off:
            self.ended_by = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())


class _Pace:
    """Lets a few through in each turn of the event loop.

    A crowd that arrives at once would otherwise be read from beginning to end before anybody else is heard: with 1,500
    requests on two cores ``/health``, and every stream, waited 0.7 s, and now 0.4 s.
    """

    def __init__(self) -> None:
        self._left = _STARTS_A_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._renews = False

    async def go(self) -> None:
        """Wait for one's turn, in the order of arrival."""
        self._renew_soon()
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _renew_soon(self) -> None:
        if not self._renews:
            self._renews = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._renews = False
        self._left = _STARTS_A_TURN
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cut off
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._renew_soon()


class RequestGate:
    """Counts, limits and ends requests.

    Args:
        max_concurrent: most requests behind it.
        timeout_s: how long each of them has, in seconds.
        phase: the first one; whoever runs the server sets the later ones.
    """

    def __init__(self, *, max_concurrent: int = 2048, timeout_s: float = 3600.0, phase: GatePhase = "open") -> None:
        self.max_concurrent: Final = max_concurrent
        self.timeout_s: Final = timeout_s
        self.phase: GatePhase = phase
        self._turns: set[Turn] = set()
        self._pace = _Pace()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Requests behind the gate."""
        return len(self._turns)

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return len(self._turns) >= self.max_concurrent

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """Count the block as a running request and cancel it at its end.

        The block begins when it is its turn.

        Raises:
            TimeoutError: it was cut off; the turn says why.
        """
        async with asyncio.timeout(self.timeout_s) as timeout:
            turn = Turn(timeout)
            self._turns.add(turn)
            self._idle.clear()
            try:
                await self._pace.go()
                yield turn
            finally:
                self._turns.discard(turn)
                if not self._turns:
                    self._idle.set()

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until nobody is behind the gate; false if that took too long, in seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """Cut off whoever is behind the gate."""
        for turn in list(self._turns):
            turn.end("shutdown")
