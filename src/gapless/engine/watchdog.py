"""A step that never comes back must not hang its callers: :class:`Watchdog`.

A device wait cannot be interrupted, so a second thread watches it. It sleeps while nothing is waited for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Watchdog"]


class Watchdog:
    """Calls ``on_late(timeout_s)`` once, in its own thread, if a watched block takes longer than ``timeout_s``."""

    def __init__(self, timeout_s: float, on_late: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._closed = threading.Event()
        self._since_s: float | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block; costs two attribute writes."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gapless-watchdog", daemon=True)
            self._thread.start()
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def close(self) -> None:
        """End the thread and let go of the listener, whose memory should not wait for the garbage collector."""
        self._closed.set()
        self._on_late = lambda waited_s: None

    def _watch(self) -> None:
        while not self._closed.wait(max(self._timeout_s / 4, 0.01)):
            since_s = self._since_s
            if since_s is not None and time.monotonic() - since_s > self._timeout_s:
                self._on_late(self._timeout_s)
                return
