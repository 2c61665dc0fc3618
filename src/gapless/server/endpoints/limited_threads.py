"""Work of unknown cost beside the event loop, with a limit on its time: :class:`LimitedThreads`.

A chat template is a program out of the checkpoint, and what it loops over comes from the client. It runs in one of a
few threads, so that neither the event loop nor the threads that tokenise wait for it. One that takes too long is cut:
CPython can raise an exception in another thread at its next bytecode, which is what a template consists of.

Belongs to the event loop; the work runs in threads of its own.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["LimitedThreads"]

_Result = TypeVar("_Result")
_GRACE_S = 1.0


class _TimeIsUpError(BaseException):
    """Raised in the working thread; no ``except Exception`` of a library holds it up."""


class LimitedThreads:
    """A few threads for work that may not take longer than a limit.

    Args:
        num_threads: how much of it runs at once.
        limit_s: for one piece of work, from when it starts.
    """

    def __init__(self, *, num_threads: int = 4, limit_s: float = 20.0) -> None:
        self.limit_s = limit_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="gapless-template")

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Run work in a thread.

        Raises:
            TimeoutError: it took too long and was cut. Where it stands in one long call outside of Python, it is cut
                after that call, and the caller hears a moment after the limit.
        """
        loop = asyncio.get_running_loop()
        piece = _Piece(work)
        timers: list[asyncio.TimerHandle] = []
        given_up: asyncio.Future[None] = loop.create_future()

        def start_clock() -> None:
            if not given_up.done():
                timers.append(loop.call_later(self.limit_s, piece.cut))
                timers.append(loop.call_later(self.limit_s + _GRACE_S, _resolve, given_up))

        result = loop.run_in_executor(self._pool, piece.run, lambda: loop.call_soon_threadsafe(start_clock))
        try:
            await asyncio.wait((result, given_up), return_when=asyncio.FIRST_COMPLETED)
            if not result.done():
                raise TimeoutError
            return result.result()
        except _TimeIsUpError:
            raise TimeoutError from None
        finally:
            given_up.cancel()
            for timer in timers:
                timer.cancel()
            if not result.done():  # nobody waits for it any more
                piece.cut()
                result.cancel()


class _Piece(Generic[_Result]):
    """One piece of work and the thread it is in, if it is in one."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._is_cut = False

    def run(self, started: Callable[[], object]) -> _Result:
        """In the thread of the pool."""
        try:
            with self._lock:
                if self._is_cut:
                    raise _TimeIsUpError
                self._thread_id = threading.get_ident()
            started()
            return self._work()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """What was raised too late must not reach the pool's next piece of work: it is caught here.

        It is not taken back (by raising ``NULL``): Python 3.11 then looks for it for good, and any later profiler or
        tracer never gets past its first function.
        """
        is_over = False
        while not is_over:
            try:
                with self._lock:
                    self._thread_id = None
                    is_cut = self._is_cut
                if is_cut:
                    _raise_in(threading.get_ident(), _TimeIsUpError)
                    while True:  # until it comes; instead of one that was on its way, if one was
                        pass
                is_over = True
            except _TimeIsUpError:
                is_over = self._thread_id is None

    def cut(self) -> None:
        """In the event loop's thread: end the work as soon as possible."""
        with self._lock:
            self._is_cut = True
            if self._thread_id is not None:
                _raise_in(self._thread_id, _TimeIsUpError)


def _raise_in(thread_id: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
