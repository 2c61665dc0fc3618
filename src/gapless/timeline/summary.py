"""A recording in numbers: :func:`summarise`, for terminals, files and benchmarks.

Pure functions over an immutable recording; any thread may call them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gapless.timeline.advice import Advice, advise
from gapless.timeline.idle import IdleReport, IdleTotals, idle_report
from gapless.timeline.roofline import Roofline, roofline_of
from gapless.timeline.spans import DeviceLane, HostPhase, Launch, Recording, StepRecord

__all__ = ["Distribution", "TimelineSummary", "headline", "host_work_s", "shown_time", "summarise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """What something took in each step, in milliseconds; zeros where there was no step.

    Attributes:
        total_s: of all steps together, in seconds.
    """

    median_ms: float
    p99_ms: float
    total_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Distribution":
        """Of each step's seconds."""
        if not seconds:
            return cls(median_ms=0.0, p99_ms=0.0, total_s=0.0)
        median, p99 = np.percentile(seconds, [50, 99]) * 1e3
        return cls(median_ms=float(median), p99_ms=float(p99), total_s=float(np.sum(seconds)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineSummary:
    """Where the time of a recording went.

    Attributes:
        device_name: of the hardware.
        depth: most steps in flight.
        num_steps: recorded.
        num_dropped: older ones that are not among them.
        num_in_flight: those that had not come back yet.
        wall_s: first submit to last collect, in seconds: ``idle.window_s`` and ``idle.no_work_s`` together.
        idle: busy time, and idle time by cause.
        roofline: decode steps against the least time that reading takes.
        phases: what the host did, by phase.
        host: what it did for a step in all, waiting left out.
        compute: how long the device computed a step.
        launches: how many steps were enqueued in which way.
        clock_error_s: how far device times may be off the host's clock, in seconds.
        advice: who sets the pace, and which depth to use; ``None`` without steps.
    """

    device_name: str
    depth: int
    num_steps: int
    num_dropped: int
    num_in_flight: int
    wall_s: float
    idle: IdleTotals
    roofline: Roofline
    phases: dict[HostPhase, Distribution]
    host: Distribution
    compute: Distribution
    launches: dict[Launch, int]
    clock_error_s: float
    advice: Advice | None

    @property
    def idle_share(self) -> float:
        """The share of the time with work in which the device was idle, from 0 to 1."""
        active = self.idle.device_active
        return 0.0 if active is None else 1.0 - active


def host_work_s(record: StepRecord) -> float:
    """What the host did for a step, waiting left out, in seconds."""
    return sum(span.duration_s for phase, span in record.host.items() if phase is not HostPhase.WAIT)


def summarise(recording: Recording, report: IdleReport | None = None) -> TimelineSummary:
    """Add a recording up, in a few passes over its steps.

    Args:
        recording: what to add up.
        report: its idle time, where it is known already.
    """
    steps, report = recording.steps, report or idle_report(recording)
    host_s = [host_work_s(record) for record in steps]
    compute_s = [record.device[DeviceLane.COMPUTE].duration_s for record in steps]
    active = report.totals.device_active
    advice = None
    if steps and active is not None:
        advice = advise(host_s=host_s, device_s=compute_s, depth=recording.depth, idle_share=1.0 - active)
    return TimelineSummary(
        device_name=recording.limits.device_name,
        depth=recording.depth,
        num_steps=len(steps),
        num_dropped=recording.num_dropped,
        num_in_flight=recording.num_in_flight,
        wall_s=report.window.duration_s,
        idle=report.totals,
        roofline=roofline_of(recording),
        phases={phase: Distribution.of([record.host[phase].duration_s for record in steps]) for phase in HostPhase},
        host=Distribution.of(host_s),
        compute=Distribution.of(compute_s),
        launches=dict(Counter(record.launch for record in steps)),
        clock_error_s=recording.clock_error_s,
        advice=advice,
    )


def headline(summary: TimelineSummary) -> str:
    """The one line that matters: how much of the time the device computed."""
    active = summary.idle.device_active
    if active is None:
        return "the timeline holds no steps"
    window_s, busy_s = summary.idle.window_s, summary.idle.busy_s
    return f"device active {active:.2%} of {shown_time(window_s)}, idle {shown_time(window_s - busy_s)}"


def shown_time(seconds: float) -> str:
    """A time with a unit that suits it."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
