"""CPU streams: each stream is a worker thread with a FIFO queue, so the hazards of overlap are real on a laptop.

A record makes a *mark*, which the worker reaches in order; ``wait`` enqueues "block until that mark". When work
raises, the stream is broken: it runs nothing more, its marks carry the error, streams that wait for such a mark break
too, and the host gets the error from ``synchronize``. So nobody hangs.

``Delays`` stretches work by fixed or random times; tests use it to force every order of events.
"""

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.pipeline.streams.protocol import Event, Stream

__all__ = ["CpuEvent", "CpuQueues", "CpuStream", "Delays"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delays:
    """Extra time before each piece of work, in seconds.

    Args:
        fixed_s: by stream name (``h2d``, ``compute``, ``d2h``).
        random_s: upper bound of a further uniform delay on every stream.
        seed: of the random delays.
    """

    fixed_s: dict[str, float]
    random_s: float = 0.0
    seed: int = 0


class _Mark:
    """One record: reached once, with the error that broke its stream, if any."""

    __slots__ = ("_reached", "error", "time_s")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None
        self.time_s = 0.0

    def reach(self, error: BaseException | None) -> None:
        self.error = error
        self.time_s = time.perf_counter()
        self._reached.set()

    def block(self) -> None:
        self._reached.wait()


class CpuEvent:
    """An event whose records are marks."""

    def __init__(self) -> None:
        self.mark: _Mark | None = None

    def synchronize(self) -> None:
        """Block until the latest mark is reached; raise what broke its stream."""
        mark = self.mark
        if mark is None:
            return
        mark.block()
        if mark.error is not None:
            raise mark.error


class CpuStream:
    """A worker thread that runs submitted work in order."""

    def __init__(self, name: str, delays: Delays | None) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._delays = delays
        self._fixed_s = delays.fixed_s.get(name, 0.0) if delays else 0.0
        self._random = random.Random(f"{delays.seed if delays else 0}-{name}")
        self._thread = threading.Thread(target=self._work, name=f"gapless-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue ``work``."""
        self._queue.put(lambda: self._run(work))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy."""
        self.submit(lambda: _copy(target, source))

    def record(self, event: Event) -> None:
        """Enqueue the reaching of a new mark of ``event``."""
        assert isinstance(event, CpuEvent)
        mark = event.mark = _Mark()
        self._queue.put(lambda: mark.reach(self._error))

    def wait(self, event: Event) -> None:
        """Enqueue waiting for the mark that is the latest now."""
        assert isinstance(event, CpuEvent)
        if (mark := event.mark) is not None:
            self._queue.put(lambda: self._wait(mark))

    def close(self) -> None:
        """End the worker once its queue is empty."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def _run(self, work: Callable[[], None]) -> None:
        if self._error is not None:
            return
        if self._delays is not None:
            time.sleep(self._fixed_s + self._random.random() * self._delays.random_s)
        try:
            work()
        except BaseException as error:
            self._error = error

    def _wait(self, mark: _Mark) -> None:
        mark.block()
        if self._error is None:
            self._error = mark.error

    def _work(self) -> None:
        with torch.inference_mode():
            while True:
                item = self._queue.get()
                if item is None:
                    return
                item()
                # Dropped before blocking in get(): a closure kept alive would keep its tensors alive.
                del item


class CpuQueues:
    """Worker threads and events of a CPU."""

    def __init__(self, delays: Delays | None = None) -> None:
        self.device = torch.device("cpu")
        self._delays = delays
        self._streams: list[CpuStream] = []
        self._finalizer = weakref.finalize(self, _close_all, self._streams)

    def stream(self, name: str) -> Stream:
        """Start a worker thread."""
        stream = CpuStream(name, self._delays)
        self._streams.append(stream)
        return stream

    def event(self) -> Event:
        """Make an event."""
        return CpuEvent()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two reached marks, by the workers' clock."""
        assert isinstance(start, CpuEvent)
        assert isinstance(end, CpuEvent)
        assert start.mark is not None
        assert end.mark is not None
        return end.mark.time_s - start.mark.time_s

    def host_time_s(self, event: Event) -> float | None:
        """When the latest mark was reached: the workers' clock is the host's."""
        assert isinstance(event, CpuEvent)
        assert event.mark is not None
        return event.mark.time_s

    def close(self) -> None:
        """End all workers."""
        self._finalizer()


def _close_all(streams: list[CpuStream]) -> None:
    for stream in streams:
        stream.close()
    streams.clear()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
