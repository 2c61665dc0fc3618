"""What every step did, and when: :class:`TimelineRecorder`, told by engine and ring as a ``StepRecorder``.

Recording must not make the gaps that it is to find. So the engine's thread takes plain times, and everything that
follows (counting the step's tokens, idle time by cause, keeping the step) is done right after the next step has been
enqueued, when the device is surely busy. Steps are rows of one array in bounded memory, the newest win; sums over the
whole life of the engine are kept apart. What readers ask for is built when they ask, in their thread.

At depth 2 and more the host works for other steps between a step's phases, so every time is kept with the step that it
belongs to: first a step is enqueued, and the oldest one that was is collected and applied.

The engine's thread writes. Any thread may read. A lock guards what both touch, for some microseconds at a time.
"""

import threading
from collections import deque
from dataclasses import dataclass, replace
from itertools import chain
from struct import Struct
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from gapless.errors import GaplessError
from gapless.timeline.device_clock import DeviceClock
from gapless.timeline.idle import IdleMeter, IdleTotals, StepSpans
from gapless.timeline.roofline import Roofline, RooflineMeter, measure_read_bandwidth, min_read_bytes
from gapless.timeline.spans import DeviceLane, DeviceLimits, HostPhase, Launch, Recording, Span, StepRecord
from gapless.timeline.step_recorder import DeviceEvent, DeviceQueue, EventSource, StepBatch, TimedBuffers

__all__ = ["TimelineRecorder", "TimelineTotals"]

_CAPACITY = 50_000
_LAUNCHES: tuple[Launch, ...] = ("kernels", "graph", "capture")


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineTotals:
    """Sums since the engine started, whatever the memory has let go since."""

    idle: IdleTotals
    roofline: Roofline


class _Submitted(NamedTuple):
    """When the host did what it does to enqueue a step."""

    schedule_s: float
    write_s: float
    enqueue_s: float
    enqueued_s: float


class _Device(NamedTuple):
    """A step's device spans, on the host's clock."""

    h2d: tuple[float, float]
    compute: tuple[float, float]
    d2h: tuple[float, float]


class _Returned(NamedTuple):
    """A step that has come back, as it was noted down."""

    submitted: _Submitted
    wait_s: float
    seen_s: float
    device: _Device
    clock_error_s: float
    batch: StepBatch
    buffers: int
    launch: Launch


class _Load(NamedTuple):
    """How much a step did; the fields of a record."""

    num_entries: int
    num_tokens: int
    num_prefill_tokens: int
    num_samples: int
    num_context_tokens: int
    num_window_tokens: int


# A row: the seven spans of StepSpans and d2h's, step, buffers, launch, clock error, then the load.
_STEP, _LOAD = 16, 20
_ROW = Struct(f"{_LOAD + len(_Load._fields)}d")


class TimelineRecorder:
    """Keeps the newest steps, and sums over all of them.

    Args:
        source: of the events that the ring records.
        device: that the engine runs on.
        depth: of the ring.
        limits: of the device and model.
        capacity: most steps that are kept; each takes about 200 bytes.
    """

    def __init__(
        self, *, source: EventSource, device: torch.device, depth: int, limits: DeviceLimits, capacity: int = _CAPACITY
    ) -> None:
        self._source = source
        self._device = device
        self._depth = depth
        self._limits = limits
        self._capacity = capacity
        # The engine's thread only.
        self._clock = DeviceClock()
        self._reference: DeviceEvent | None = None
        self._lane_ends = [0.0, 0.0, 0.0]
        self._buffers: dict[TimedBuffers, int] = {}
        self._schedule_s = self._write_s = self._enqueue_s = self._wait_s = self._sleep_s = 0.0
        self._in_flight: deque[_Submitted] = deque()
        self._returned: _Returned | None = None
        # Behind the lock.
        self._lock = threading.Lock()
        self._applied: deque[tuple[_Returned, float]] = deque()
        self._rows = np.zeros((capacity, _ROW.size // 8))
        self._num_submitted = 0
        self._num_kept = 0  # steps that were ever put into rows; step n is in row n modulo the capacity
        self._num_cleared = 0
        self._sleeps: deque[tuple[int, Span]] = deque(maxlen=capacity)  # with the number of the step after it
        self._idle = IdleMeter()
        self._roofline = RooflineMeter()

    # --- for readers, from any thread ------------------------------------------------------------------------------

    def recording(self, first_step: int = 0) -> Recording:
        """The newest steps that the memory still holds; takes some microseconds a step in the caller's thread.

        Args:
            first_step: earlier ones are left out, and count as dropped.
        """
        with self._lock:
            self._settle()
            end, num_in_flight = self._num_kept, self._num_submitted - self._num_kept
            begin = min(max(first_step, self._num_cleared, end - self._capacity), end)
            sleeps = list(self._sleeps)
        rows = self._rows[np.arange(begin, end) % self._capacity]
        with self._lock:
            # The engine went on meanwhile: its new steps took the places of the oldest ones.
            num_lost = min(max(self._num_kept - self._capacity - begin, 0), end - begin)
            limits = self._limits
        rows, begin = rows[num_lost:], begin + num_lost
        return Recording(
            steps=tuple(map(_record_of, rows.tolist())),
            sleeps=tuple(span for step, span in sleeps if step >= begin),
            depth=self._depth,
            limits=limits,
            clock_error_s=float(rows[:, _STEP + 3].max(initial=0.0)),
            num_dropped=begin,
            num_in_flight=num_in_flight,
        )

    def totals(self) -> TimelineTotals:
        """Sums over the life of the engine, up to the latest step that has come back."""
        with self._lock:
            self._settle()
            return TimelineTotals(
                idle=self._idle.totals(), roofline=self._roofline.roofline(self._limits.read_bytes_per_s)
            )

    def clear(self) -> None:
        """Let go of the steps kept so far; they count as dropped. The sums go on."""
        with self._lock:
            self._settle()
            self._num_cleared = self._num_kept

    def measure_read_bandwidth(self) -> float:
        """Measure how fast this device reads, in bytes a second; recordings and totals know it from then on.

        Takes some tenths of a second and memory, see :func:`~gapless.timeline.roofline.measure_read_bandwidth`.

        Raises:
            GaplessError: steps are in flight, which would disturb the measurement and be disturbed.
            ConfigError: too little memory is free.
        """
        with self._lock:
            num_in_flight = self._num_submitted - self._num_kept - len(self._applied)
        if num_in_flight > 0:
            raise GaplessError(f"{num_in_flight} steps are in flight: measure the read bandwidth while no request runs")
        bandwidth = measure_read_bandwidth(self._device)
        with self._lock:
            self._limits = replace(self._limits, read_bytes_per_s=bandwidth)
        return bandwidth

    # --- for the engine's thread; see StepRecorder -----------------------------------------------------------------

    def scheduling(self) -> None:
        """See :meth:`StepRecorder.scheduling`."""
        self._schedule_s = perf_counter()

    def writing(self) -> None:
        """See :meth:`StepRecorder.writing`."""
        self._write_s = perf_counter()

    def enqueueing(self) -> None:
        """See :meth:`StepRecorder.enqueueing`."""
        self._enqueue_s = perf_counter()

    def mark(self, queue: DeviceQueue, event: DeviceEvent) -> None:
        """See :meth:`StepRecorder.mark`."""
        queue.record(event)

    def enqueued(self) -> None:
        """See :meth:`StepRecorder.enqueued`. The device has work now, so this is the time to look after older steps."""
        self._in_flight.append(_Submitted(self._schedule_s, self._write_s, self._enqueue_s, perf_counter()))
        with self._lock:
            self._num_submitted += 1
            self._settle()

    def waiting(self) -> None:
        """See :meth:`StepRecorder.waiting`."""
        self._wait_s = perf_counter()

    def collected(self, batch: StepBatch, buffers: TimedBuffers) -> None:
        """See :meth:`StepRecorder.collected`."""
        seen_s = perf_counter()
        submitted = self._in_flight.popleft()
        device = self._device_spans(buffers, submitted.enqueue_s, seen_s)
        number = self._buffers.setdefault(buffers, len(self._buffers))
        if batch.step < 0:  # the warm-up, which nobody waits for
            with self._lock:
                self._num_submitted -= 1
            return
        self._returned = _Returned(
            submitted, self._wait_s, seen_s, device, self._clock.error_s, batch, number, buffers.launch
        )

    def applied(self) -> None:
        """See :meth:`StepRecorder.applied`."""
        assert self._returned is not None
        self._applied.append((self._returned, perf_counter()))
        self._returned = None

    def slept(self) -> None:
        """See :meth:`StepRecorder.slept`."""
        self._sleep_s = perf_counter()
        with self._lock:
            self._settle()
            self._idle.end_period()

    def woke(self) -> None:
        """See :meth:`StepRecorder.woke`."""
        with self._lock:
            self._sleeps.append((self._num_kept, Span(self._sleep_s, perf_counter())))

    def _device_spans(self, buffers: TimedBuffers, enqueue_s: float, seen_s: float) -> _Device:
        """Read the events of a step that has come back. Spans of a lane follow each other, whatever the clock does."""
        start, elapsed_s = buffers.h2d_start, self._source.elapsed_s
        lasted_s = elapsed_s(start, buffers.d2h_done)
        start_s = self._source.host_time_s(start)
        if start_s is None:
            start_s = self._clock.observe(
                0.0 if self._reference is None else elapsed_s(self._reference, start),
                enqueued_s=enqueue_s,
                seen_s=seen_s,
                lasted_s=lasted_s,
            )
            # The step to come measures from this event, so these buffers record another one from now on.
            buffers.h2d_start = self._source.event() if self._reference is None else self._reference
            self._reference = start
        else:
            self._clock.observe(0.0, enqueued_s=start_s, seen_s=start_s, lasted_s=0.0)
        return _Device(
            self._lane(0, start_s, start_s + elapsed_s(start, buffers.h2d_done)),
            self._lane(
                1, start_s + elapsed_s(start, buffers.compute_start), start_s + elapsed_s(start, buffers.compute_done)
            ),
            self._lane(2, start_s + elapsed_s(start, buffers.d2h_start), start_s + lasted_s),
        )

    def _lane(self, lane: int, start_s: float, end_s: float) -> tuple[float, float]:
        start_s = max(start_s, self._lane_ends[lane])
        end_s = self._lane_ends[lane] = max(start_s, end_s)
        return (start_s, end_s)

    def _settle(self) -> None:
        """Count and keep the steps that were applied. Behind the lock."""
        while self._applied:
            step, applied_s = self._applied.popleft()
            load = _load_of(step.batch, self._limits.window)
            times, device = step.submitted, step.device
            spans = StepSpans(
                schedule=(times.schedule_s, times.write_s),
                write=(times.write_s, times.enqueue_s),
                enqueue=(times.enqueue_s, times.enqueued_s),
                wait=(step.wait_s, step.seen_s),
                apply=(step.seen_s, applied_s),
                h2d=device.h2d,
                compute=device.compute,
            )
            grown_s = self._idle.add(spans)
            if not load.num_prefill_tokens:
                num_bytes = min_read_bytes(
                    self._limits,
                    num_context_tokens=load.num_context_tokens,
                    num_window_tokens=load.num_window_tokens,
                )
                self._roofline.add(num_bytes, device.compute[1] - device.compute[0], grown_s)
            _ROW.pack_into(
                self._rows.data,
                self._num_kept % self._capacity * _ROW.size,
                *chain.from_iterable(spans),
                *device.d2h,
                step.batch.step,
                step.buffers,
                _LAUNCHES.index(step.launch),
                step.clock_error_s,
                *load,
            )
            self._num_kept += 1


def _load_of(batch: StepBatch, window: int | None) -> _Load:
    num_entries = len(batch.entries)
    seq_lens = batch.seq_lens[:num_entries]
    num_context_tokens = int(np.add.reduce(seq_lens, dtype=np.int64))
    num_tokens, num_samples, num_prefill_tokens = num_entries, num_entries, 0
    if not len(batch.input_ids) == len(batch.sample_rows) == len(batch.seq_lens):
        num_tokens = sum(entry.num_tokens for entry in batch.entries)
        num_samples = sum(entry.samples for entry in batch.entries)
        prefills = (entry for entry in batch.entries if entry.num_tokens > 1 or not entry.samples)
        num_prefill_tokens = sum(entry.num_tokens for entry in prefills)
    return _Load(
        num_entries=num_entries,
        num_tokens=num_tokens,
        num_prefill_tokens=num_prefill_tokens,
        num_samples=num_samples,
        num_context_tokens=num_context_tokens,
        # An entry's first new token sees window - 1 tokens before it.
        num_window_tokens=num_context_tokens
        if window is None
        else int(np.minimum(seq_lens, batch.query_lens[:num_entries] + (window - 1)).sum()),
    )


def _record_of(row: list[float]) -> StepRecord:
    spans = [Span(row[i], row[i + 1]) for i in range(0, _STEP, 2)]
    step, buffers, launch = (int(value) for value in row[_STEP : _STEP + 3])
    load = _Load(*map(int, row[_LOAD:]))
    return StepRecord(
        step=step,
        buffers=buffers,
        host=dict(zip(HostPhase, spans, strict=False)),
        device=dict(zip(DeviceLane, spans[len(HostPhase) :], strict=True)),
        num_entries=load.num_entries,
        num_tokens=load.num_tokens,
        num_prefill_tokens=load.num_prefill_tokens,
        num_samples=load.num_samples,
        num_context_tokens=load.num_context_tokens,
        num_window_tokens=load.num_window_tokens,
        launch=_LAUNCHES[launch],
    )
