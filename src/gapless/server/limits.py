"""How many requests run at once, and how they end when they must: :class:`RequestGate`.

Every request that can make work (each POST) passes the gate. It counts them, refuses more than its limit and, when the
server drains, all of them; it ends those that outlive their deadline or the drain. Ending means cancelling the task:
closing its generators is what aborts a generation. Belongs to the event loop.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Literal

__all__ = ["GatePhase", "RequestGate", "Turn"]

GatePhase = Literal["starting", "open", "draining", "dead"]


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

        Raises:
            TimeoutError: it was cut off; the turn says why.
        """
        async with asyncio.timeout(self.timeout_s) as timeout:
            turn = Turn(timeout)
            self._turns.add(turn)
            self._idle.clear()
            try:
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
