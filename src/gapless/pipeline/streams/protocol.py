"""The interface of a device queue: streams run work in order, events order streams against each other.

Semantics are CUDA's. ``Stream.wait(event)`` and ``Event.synchronize()`` mean the latest ``record`` at the time of the
call; an event that was never recorded holds nobody up. A stream never blocks the host: only ``synchronize`` does.

Every implementation is driven by one host thread, the engine's loop.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Event", "Queues", "Stream"]


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the host until the latest record is reached; raises what the device work raised before it."""


class Stream(Protocol):
    """A queue of device work, run in order."""

    def submit(self, work: Callable[[], None]) -> None:
        """Enqueue ``work``: it launches kernels (CUDA) or computes (CPU), and never waits for the host."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue ``target.copy_(source)`` between pinned host memory and the device."""

    def record(self, event: Event) -> None:
        """Mark the end of everything enqueued so far."""

    def wait(self, event: Event) -> None:
        """Hold back what is enqueued from now on until the event's latest record is reached."""


class Queues(Protocol):
    """A device's streams, events and memory.

    Attributes:
        device: where device tensors live.
    """

    device: torch.device

    def stream(self, name: str) -> Stream:
        """Make a stream of its own (never the default one)."""

    def event(self) -> Event:
        """Make an event of this device."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """``[num_bytes]``, uint8, on the host, pinned where that means something."""

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds of device time between two reached records."""

    def host_time_s(self, event: Event) -> float | None:
        """When a record was reached, on ``time.perf_counter``; ``None`` from a device with a clock of its own."""

    def close(self) -> None:
        """Stop workers. Nothing may be enqueued afterwards."""
