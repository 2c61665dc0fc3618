"""Why the device did not compute: :func:`idle_report` for a recording, :class:`IdleMeter` step by step.

A gap on the compute lane is put down to what the next step lacked, moment by moment, in this order:

1. while the copy of the step's inputs runs: its inputs;
2. until the host has enqueued the step: the host, by what its thread did then, whichever step that was for. Waiting for
   a step to come back is a cause of its own (results), and so is what belongs to no phase (commands, giving news to
   callers);
3. after that: launch latency, which is the device's own.

What is counted runs from the first submit to the last collect. When the engine slept for want of requests, the time
from the last step's return to the next submit is no work, and apart from all sums. By construction busy time and the
causes add up to the window.

A report is made by any thread from an immutable recording. A meter belongs to whoever feeds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import NamedTuple

from gapless.timeline.spans import DeviceLane, HostPhase, Recording, Span, StepRecord

__all__ = [
    "IdleCause",
    "IdleMeter",
    "IdlePart",
    "IdleReport",
    "IdleTotals",
    "MeteredStep",
    "StepSpans",
    "idle_report",
    "metered",
]


class IdleCause(Enum):
    """What kept the device from computing."""

    SCHEDULE = "schedule"
    WRITE = "write"
    ENQUEUE = "enqueue"
    RESULTS = "results"
    APPLY = "apply"
    HOST_OTHER = "host other"
    INPUTS = "inputs"
    LAUNCH = "launch"
    NO_WORK = "no work"


_COUNTED = tuple(cause for cause in IdleCause if cause is not IdleCause.NO_WORK)
# In the order of the phases, and of the first fields of StepSpans.
_PHASES = (IdleCause.SCHEDULE, IdleCause.WRITE, IdleCause.ENQUEUE, IdleCause.RESULTS, IdleCause.APPLY)
_START = itemgetter(0)


class IdlePart(NamedTuple):
    """A gap, or the part of one, that has one cause."""

    span: Span
    cause: IdleCause


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTotals:
    """Sums in seconds; ``busy_s`` and all of ``idle_s`` add up to ``window_s``.

    Attributes:
        num_steps: that were counted.
        busy_s: time in which the device computed.
        window_s: first submit to last collect, without the time in which there was no work.
        no_work_s: time in which there was none, between steps.
        idle_s: by cause, every one but ``NO_WORK``.
    """

    num_steps: int
    busy_s: float
    window_s: float
    no_work_s: float
    idle_s: dict[IdleCause, float]

    @property
    def device_active(self) -> float | None:
        """The share of the window in which the device computed; ``None`` when nothing ran."""
        return self.busy_s / self.window_s if self.window_s > 0 else None

    def since(self, earlier: "IdleTotals") -> "IdleTotals":
        """What was added after ``earlier``."""
        return IdleTotals(
            num_steps=self.num_steps - earlier.num_steps,
            busy_s=self.busy_s - earlier.busy_s,
            window_s=self.window_s - earlier.window_s,
            no_work_s=self.no_work_s - earlier.no_work_s,
            idle_s={cause: seconds - earlier.idle_s[cause] for cause, seconds in self.idle_s.items()},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleReport:
    """A recording's idle time.

    Attributes:
        totals: the sums.
        window: from the first submit to the last collect, sleeps inside. Where older steps were dropped it begins with
            the first step's compute, and where steps are in flight it ends with the last step's.
        parts: every gap on the compute lane in order of time, split by cause; ``NO_WORK`` among them.
    """

    totals: IdleTotals
    window: Span
    parts: tuple[IdlePart, ...]


class StepSpans(NamedTuple):
    """The spans of a step that decide about idle time: (start, end) each, in seconds."""

    schedule: tuple[float, float]
    write: tuple[float, float]
    enqueue: tuple[float, float]
    wait: tuple[float, float]
    apply: tuple[float, float]
    h2d: tuple[float, float]
    compute: tuple[float, float]

    @classmethod
    def of(cls, step: StepRecord) -> "StepSpans":
        """Those of a recorded step."""
        host, device = step.host, step.device
        return cls(
            schedule=host[HostPhase.SCHEDULE],
            write=host[HostPhase.WRITE],
            enqueue=host[HostPhase.ENQUEUE],
            wait=host[HostPhase.WAIT],
            apply=host[HostPhase.APPLY],
            h2d=device[DeviceLane.H2D],
            compute=device[DeviceLane.COMPUTE],
        )


class MeteredStep(NamedTuple):
    """A step that a meter has counted, and by how many seconds the window grew: its compute and the gap before it."""

    record: StepRecord
    grown_s: float


class IdleMeter:
    """Adds up idle time, a step at a time, in time and memory that do not depend on how many there were.

    Args:
        parts: where to put the parts of gaps as well; ``None`` keeps sums only.

    Attributes:
        start_s: when the first busy period began; ``None`` before the first step.
        pending: the host's spans that reach beyond what is accounted for, as (start, end, cause): at most a few steps'.
    """

    def __init__(self, parts: list[IdlePart] | None = None) -> None:
        self._parts = parts
        self._idle_s = dict.fromkeys(IdleCause, 0.0)
        self._busy_s = 0.0
        self._window_s = 0.0
        self._num_steps = 0
        # Up to where the compute lane is accounted for; ``None`` between two busy periods.
        self._cursor_s: float | None = None
        self.pending: list[tuple[float, float, IdleCause]] = []
        self._last_collect_s: float | None = None
        self.start_s: float | None = None

    def totals(self) -> IdleTotals:
        """The sums up to the end of the latest step's compute, or up to the last ``end_period``."""
        return IdleTotals(
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            window_s=self._window_s,
            no_work_s=self._idle_s[IdleCause.NO_WORK],
            idle_s={cause: self._idle_s[cause] for cause in _COUNTED},
        )

    @property
    def end_s(self) -> float | None:
        """Up to where time is accounted for; ``None`` before the first step."""
        return self._last_collect_s if self._cursor_s is None else self._cursor_s

    def start_at(self, time_s: float) -> None:
        """Begin in the middle of traffic: what was before ``time_s`` is not counted."""
        self._cursor_s = time_s

    def add(self, step: StepSpans) -> float:
        """Count the next step and the gap before it; returns by how many seconds the window grew."""
        host = self.pending
        for (phase_start_s, phase_end_s), cause in zip(step, _PHASES, strict=False):
            host.append((phase_start_s, phase_end_s, cause))
        cursor_s = self._cursor_s
        if cursor_s is None:
            cursor_s = step.write[0]
            if self._last_collect_s is not None and cursor_s > self._last_collect_s:
                self._put(self._last_collect_s, cursor_s, IdleCause.NO_WORK)
        began_s = cursor_s
        if self.start_s is None:
            self.start_s = began_s
        start_s, end_s = step.compute
        if start_s > cursor_s:
            host.sort(key=_START)
            self._count_gap(cursor_s, start_s, step)
            cursor_s = start_s
        if end_s > cursor_s:
            self._busy_s += end_s - cursor_s
            cursor_s = end_s
        self._cursor_s = cursor_s
        self._last_collect_s = step.wait[1]
        self._num_steps += 1
        self._window_s += cursor_s - began_s
        self.pending = [span for span in host if span[1] > cursor_s]
        return cursor_s - began_s

    def end_period(self) -> None:
        """Everything has come back and nothing follows for now: count the time until the host knew the last step."""
        cursor_s, end_s = self._cursor_s, self._last_collect_s
        if cursor_s is not None and end_s is not None:
            if end_s > cursor_s:
                self.pending.sort(key=_START)
                self._count_host(cursor_s, end_s)
                self._window_s += end_s - cursor_s
            else:
                self._last_collect_s = cursor_s
        self._cursor_s = None
        self.pending = []

    def _count_gap(self, start_s: float, end_s: float, step: StepSpans) -> None:
        """Split the gap that ends where the step's compute starts."""
        enqueued_s = step.enqueue[1]
        copy_start_s = min(max(step.h2d[0], start_s), end_s)
        copy_end_s = min(max(step.h2d[1], copy_start_s), end_s)
        self._count_until(start_s, copy_start_s, enqueued_s)
        if copy_end_s > copy_start_s:
            self._put(copy_start_s, copy_end_s, IdleCause.INPUTS)
        self._count_until(copy_end_s, end_s, enqueued_s)

    def _count_until(self, start_s: float, end_s: float, enqueued_s: float) -> None:
        """The host's part until the step was enqueued, and the device's after it."""
        edge_s = min(max(enqueued_s, start_s), end_s)
        if edge_s > start_s:
            self._count_host(start_s, edge_s)
        if end_s > edge_s:
            self._put(edge_s, end_s, IdleCause.LAUNCH)

    def _count_host(self, start_s: float, end_s: float) -> None:
        """Split by what the host's thread did."""
        for phase_start_s, phase_end_s, cause in self.pending:
            if phase_end_s <= start_s:
                continue
            if phase_start_s >= end_s:
                break
            if phase_start_s > start_s:
                self._put(start_s, phase_start_s, IdleCause.HOST_OTHER)
                start_s = phase_start_s
            until_s = min(phase_end_s, end_s)
            self._put(start_s, until_s, cause)
            start_s = until_s
        if end_s > start_s:
            self._put(start_s, end_s, IdleCause.HOST_OTHER)

    def _put(self, start_s: float, end_s: float, cause: IdleCause) -> None:
        self._idle_s[cause] += end_s - start_s
        if self._parts is not None:
            self._parts.append(IdlePart(Span(start_s, end_s), cause))


def metered(recording: Recording, meter: IdleMeter) -> Iterator[MeteredStep]:
    """Feed a recording to a fresh meter; gives each step once it is counted."""
    sleep_starts = [sleep.start_s for sleep in recording.sleeps]
    num_seen = 0
    for index, record in enumerate(recording.steps):
        step = StepSpans.of(record)
        num_before = num_seen
        while num_seen < len(sleep_starts) and sleep_starts[num_seen] < step.write[0]:
            num_seen += 1
        if num_seen > num_before:
            meter.end_period()
        elif index == 0 and recording.num_dropped:
            meter.start_at(step.compute[0])
        yield MeteredStep(record, meter.add(step))
    if not recording.num_in_flight:
        meter.end_period()


def idle_report(recording: Recording) -> IdleReport:
    """Split all idle time of a recording by cause, in one pass over its steps."""
    parts: list[IdlePart] = []
    meter = IdleMeter(parts)
    for _ in metered(recording, meter):
        pass
    window = Span(0.0, 0.0) if meter.start_s is None or meter.end_s is None else Span(meter.start_s, meter.end_s)
    return IdleReport(totals=meter.totals(), window=window, parts=tuple(parts))
