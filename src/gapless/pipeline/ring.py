"""The ring of step buffers: how host and device overlap.

::

    host     | schedule N+1 | write | enqueue |   wait d2h_done(N)   | apply N | schedule N+2 ...
    h2d      |                        [inputs N+1]
    compute  | [carry-over, forward, sample  N ........][carry-over, forward, sample  N+1 ........]
    d2h      |                                          [tokens N]

``depth`` is the most steps in flight: 1 is synchronous batching, 2 the double buffer, 3 hides host jitter as well.
Streams are ordered by events only. The host waits in one place, :meth:`Ring.collect`. Engine thread only.
"""

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from gapless.pipeline.batch import ScheduledBatch, StepResult
from gapless.pipeline.device_step import StepExecutor
from gapless.pipeline.layout import StepLayout
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.protocol import Queues
from gapless.timeline.step_recorder import NO_TIMELINE, StepRecorder

__all__ = ["CollectedStep", "Ring"]


@dataclass(frozen=True, slots=True)
class _StepInFlight:
    batch: ScheduledBatch
    buffers: StepBuffers


@dataclass(frozen=True, slots=True)
class CollectedStep:
    """A step that has come back: what was asked and what it gave."""

    batch: ScheduledBatch
    result: StepResult


class Ring:
    """Step buffers in rotation, and the steps in flight, oldest first; ``timeline`` hears of each."""

    def __init__(
        self,
        *,
        queues: Queues,
        depth: int,
        limits: BufferLimits,
        device_step: StepExecutor,
        timeline: StepRecorder = NO_TIMELINE,
    ) -> None:
        assert depth >= 1
        self._queues = queues
        self._device_step = device_step
        self._timeline = timeline
        self._h2d = queues.stream("h2d")
        self._compute = queues.stream("compute")
        self._d2h = queues.stream("d2h")
        self._free = deque(StepBuffers(queues, limits) for _ in range(depth))
        self._in_flight: deque[_StepInFlight] = deque()

    @property
    def has_room(self) -> bool:
        """Whether another step can be enqueued now."""
        return bool(self._free)

    @property
    def num_in_flight(self) -> int:
        """Steps enqueued and not collected."""
        return len(self._in_flight)

    @property
    def oldest(self) -> ScheduledBatch | None:
        """The batch that ``collect`` will return next."""
        return self._in_flight[0].batch if self._in_flight else None

    def submit(self, batch: ScheduledBatch) -> None:
        """Write and enqueue a step; returns without waiting for anything."""
        self._timeline.writing()
        buffers = self._free.popleft()
        layout = buffers.write(batch)
        self._timeline.enqueueing()

        # From here on the host side of these buffers belongs to the copy (invariant 1).
        used = layout.num_bytes
        self._timeline.mark(self._h2d, buffers.h2d_start)
        self._h2d.copy(buffers.device_in[:used], buffers.host_in[:used])
        self._h2d.record(buffers.h2d_done)

        self._compute.wait(buffers.h2d_done)
        self._compute.record(buffers.compute_start)
        self._enqueue_compute(batch, layout, buffers)
        self._compute.record(buffers.compute_done)

        self._d2h.wait(buffers.compute_done)
        self._timeline.mark(self._d2h, buffers.d2h_start)
        if used_out := buffers.output_bytes(batch):
            self._d2h.copy(buffers.host_out[:used_out], buffers.device_out[:used_out])
        self._d2h.record(buffers.d2h_done)
        self._in_flight.append(_StepInFlight(batch, buffers))
        self._timeline.enqueued()

    def collect(self) -> CollectedStep:
        """Wait for the oldest step and return what it gave: the only place where the host waits for the device."""
        step = self._in_flight[0]
        self._timeline.waiting()
        step.buffers.d2h_done.synchronize()
        self._timeline.collected(step.batch, step.buffers)
        self._in_flight.popleft()
        busy_s = self._queues.elapsed_s(step.buffers.compute_start, step.buffers.compute_done)
        result = step.buffers.read(step.batch, busy_s)
        self._free.append(step.buffers)
        return CollectedStep(step.batch, result)

    def _enqueue_compute(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        logits: list[Tensor] = []
        self._compute.submit(lambda: logits.append(self._device_step.forward(batch, layout, buffers)))
        self._compute.submit(lambda: self._device_step.sample(logits.pop(), batch, layout, buffers))
