"""A deterministic simulator of device queues: no threads, every order of work chosen by a seed.

At every host call, and whenever the host waits, zero or more ready items run in an order drawn from the seed. How
eager the device is, and the weight of each queue, are drawn too, with "runs at once" and "runs only when waited for"
among the possibilities. A copy is several items, so that half-done copies happen. Every order it makes is a legal run
of real queues, so an engine that is wrong under one of them is wrong; a failing seed replays exactly. (The way
FoundationDB tests its cluster: Zhou et al., "FoundationDB: A Distributed Unbundled Transactional Key Value Store",
SIGMOD 2021.)
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from gapless.pipeline.streams.protocol import Event, Stream

__all__ = ["SimulatedDeadlockError", "SimulatorQueues"]

_COPY_PIECES = 3


class SimulatedDeadlockError(AssertionError):
    """The host waits for a record that no ready work can reach."""


@dataclass(slots=True)
class _Mark:
    reached: bool = False


@dataclass(slots=True)
class _Item:
    """One piece of queued work, a mark to reach, or a mark to wait for."""

    work: Callable[[], None] | None = None
    reach: _Mark | None = None
    wait: _Mark | None = None


class SimulatedEvent:
    """An event of the simulator."""

    def __init__(self, queues: "SimulatorQueues") -> None:
        self.mark: _Mark | None = None
        self._queues = queues

    def synchronize(self) -> None:
        """Run ready work in seeded order until the latest mark is reached."""
        if self.mark is not None:
            self._queues.run_until(self.mark)


@dataclass(slots=True)
class SimulatedStream:
    """A FIFO of items and its weight in the draw."""

    queues: "SimulatorQueues"
    weight: float
    items: deque[_Item] = field(default_factory=deque)

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue work."""
        self._put(_Item(work=work))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy as several items."""
        size = len(target)
        edges = [size * i // _COPY_PIECES for i in range(_COPY_PIECES + 1)]
        for start, end in pairwise(edges):
            self.items.append(_Item(work=_copier(target[start:end], source[start:end])))
        self.queues.run_some()

    def record(self, event: Event) -> None:
        """Enqueue a mark."""
        assert isinstance(event, SimulatedEvent)
        event.mark = _Mark()
        self._put(_Item(reach=event.mark))

    def wait(self, event: Event) -> None:
        """Enqueue waiting for the latest mark."""
        assert isinstance(event, SimulatedEvent)
        if event.mark is not None:
            self._put(_Item(wait=event.mark))

    @property
    def ready(self) -> bool:
        """Whether the head can run now."""
        if not self.items:
            return False
        wait = self.items[0].wait
        return wait is None or wait.reached

    def run_head(self) -> None:
        """Run the head item."""
        item = self.items.popleft()
        if item.work is not None:
            with torch.inference_mode():
                item.work()
        if item.reach is not None:
            item.reach.reached = True

    def _put(self, item: _Item) -> None:
        self.items.append(item)
        self.queues.run_some()


class SimulatorQueues:
    """Queues whose order of work is a function of a seed."""

    def __init__(self, seed: int) -> None:
        self.device = torch.device("cpu")
        self._random = random.Random(f"queues-{seed}")
        self._eagerness = self._random.choice([0.0, 1.0, self._random.random(), self._random.random()])
        self._streams: list[SimulatedStream] = []

    def stream(self, name: str) -> Stream:
        """Make a queue with a drawn weight."""
        stream = SimulatedStream(queues=self, weight=self._random.choice([0.02, 0.3, 1.0, 5.0]))
        self._streams.append(stream)
        return stream

    def event(self) -> Event:
        """Make an event."""
        return SimulatedEvent(self)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Ordinary memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """No time passes here."""
        return 0.0

    def host_time_s(self, event: Event) -> float | None:
        """Nor is there a clock: ``None``."""
        return None

    def close(self) -> None:
        """Forget what is queued."""
        for stream in self._streams:
            stream.items.clear()

    def run_some(self) -> None:
        """Run zero or more ready items: what a real device may have done by now."""
        if self._eagerness == 0.0:
            return
        while self._eagerness == 1.0 or self._random.random() < self._eagerness:
            if not self._run_one():
                return

    def run_until(self, mark: _Mark) -> None:
        """Run ready items in drawn order until ``mark`` is reached."""
        while not mark.reached:
            if not self._run_one():
                raise SimulatedDeadlockError("the host waits for work that cannot run")

    def _run_one(self) -> bool:
        ready = [stream for stream in self._streams if stream.ready]
        if not ready:
            return False
        if len(ready) == 1:
            ready[0].run_head()
            return True
        self._random.choices(ready, [stream.weight for stream in ready])[0].run_head()
        return True


def _copier(target: Tensor, source: Tensor) -> Callable[[], None]:
    return lambda: _copy(target, source)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
