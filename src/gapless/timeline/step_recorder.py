"""What engine and ring tell a timeline of every step: :class:`StepRecorder`, and :data:`NO_TIMELINE`, which drops it.

The pipeline knows nothing else of the timeline, and the timeline of the pipeline only what the protocols here say. All
calls come from the thread that drives the ring, the engine's.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gapless.timeline.spans import Launch

__all__ = [
    "NO_TIMELINE",
    "BatchPart",
    "DeviceEvent",
    "DeviceQueue",
    "EventSource",
    "NoTimeline",
    "StepBatch",
    "StepRecorder",
    "TimedBuffers",
]


class DeviceEvent(Protocol):
    """A point in the work of a device's queue, as :mod:`gapless.pipeline.streams` makes them."""

    def synchronize(self) -> None:
        """Wait for it; nobody here does."""


class DeviceQueue(Protocol):
    """A queue of device work."""

    def record(self, event: DeviceEvent) -> None:
        """Mark the end of everything enqueued so far."""


class EventSource(Protocol):
    """What a device tells of its events."""

    def event(self) -> DeviceEvent:
        """Make one."""

    def elapsed_s(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """Seconds of device time between two reached records."""

    def host_time_s(self, event: DeviceEvent) -> float | None:
        """When a record was reached, on ``time.perf_counter``; ``None`` from a device with a clock of its own."""


class TimedBuffers(Protocol):
    """What a set of step buffers knows of the time of its step."""

    h2d_start: DeviceEvent
    launch: Launch

    @property
    def h2d_done(self) -> DeviceEvent:
        """The inputs are there."""

    @property
    def compute_start(self) -> DeviceEvent:
        """After the last stream wait."""

    @property
    def compute_done(self) -> DeviceEvent:
        """After the last kernel."""

    @property
    def d2h_start(self) -> DeviceEvent:
        """The result's copy may begin."""

    @property
    def d2h_done(self) -> DeviceEvent:
        """The result is there."""


class BatchPart(Protocol):
    """One request's part in a step."""

    @property
    def num_tokens(self) -> int:
        """New tokens."""

    @property
    def samples(self) -> bool:
        """Whether a token is sampled."""


class StepBatch(Protocol):
    """What a recorder wants to know of a batch; see :class:`~gapless.pipeline.batch.ScheduledBatch`."""

    @property
    def step(self) -> int:
        """Its number; negative for one that is nobody's."""

    @property
    def entries(self) -> Sequence[BatchPart]:
        """Without padding."""

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """One for each token, padding at the end."""

    @property
    def query_lens(self) -> NDArray[np.int32]:
        """New tokens by entry, padding at the end."""

    @property
    def sample_rows(self) -> NDArray[np.int32]:
        """One for each sample, padding at the end."""

    @property
    def seq_lens(self) -> NDArray[np.int32]:
        """Context by entry, padding at the end."""


class StepRecorder(Protocol):
    """What engine and ring tell of steps, in this order for each. Engine thread only."""

    def scheduling(self) -> None:
        """The next step is about to be planned."""

    def writing(self) -> None:
        """Its inputs are about to be written."""

    def enqueueing(self) -> None:
        """Nothing of it has been enqueued yet; that begins now."""

    def mark(self, queue: DeviceQueue, event: DeviceEvent) -> None:
        """Record an event that only the timeline needs."""

    def enqueued(self) -> None:
        """All of it is enqueued."""

    def waiting(self) -> None:
        """The host begins to wait for the oldest step."""

    def collected(self, batch: StepBatch, buffers: TimedBuffers) -> None:
        """The oldest step has come back; its events are not recorded again before this returns."""

    def applied(self) -> None:
        """Its results have been applied."""

    def slept(self) -> None:
        """Nothing is in flight and there is nothing to do: the thread is about to sleep."""

    def woke(self) -> None:
        """It does not sleep any more."""


class NoTimeline:
    """A recorder that records nothing."""

    def scheduling(self) -> None:
        """Nothing."""

    def writing(self) -> None:
        """Nothing."""

    def enqueueing(self) -> None:
        """Nothing."""

    def mark(self, queue: DeviceQueue, event: DeviceEvent) -> None:
        """Nothing."""

    def enqueued(self) -> None:
        """Nothing."""

    def waiting(self) -> None:
        """Nothing."""

    def collected(self, batch: StepBatch, buffers: TimedBuffers) -> None:
        """Nothing."""

    def applied(self) -> None:
        """Nothing."""

    def slept(self) -> None:
        """Nothing."""

    def woke(self) -> None:
        """Nothing."""


NO_TIMELINE = NoTimeline()
