"""A recording as lanes: what the host did, and each device queue, in order of time and without overlap.

The host's thread does one thing at a time and a queue runs one thing at a time, so spans of one lane never overlap.
Device times are known only as far as the clocks agree; where that makes two spans of a lane touch across each other,
the later one is cut to begin where the earlier one ends. Pure functions; any thread may call them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gapless.timeline.spans import DeviceLane, HostPhase, Recording, Span, StepRecord

__all__ = ["Lane", "LaneSpan", "buffers_name", "device_lane", "first_time_s", "host_lane", "last_time_s"]

Lane: TypeAlias = HostPhase | DeviceLane


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSpan:
    """What a lane did for one step: a phase of the host's, or the work of a device queue."""

    start_s: float
    end_s: float
    what: Lane
    record: StepRecord


def host_lane(steps: Iterable[StepRecord]) -> list[LaneSpan]:
    """Every phase of every step, in order of time."""
    return list(_without_overlap([(span, phase, record) for record in steps for phase, span in record.host.items()]))


def device_lane(steps: Iterable[StepRecord], lane: DeviceLane) -> list[LaneSpan]:
    """What a device queue did, in order of time."""
    return list(_without_overlap([(record.device[lane], lane, record) for record in steps if lane in record.device]))


def first_time_s(recording: Recording) -> float:
    """When the first recorded step began to be scheduled; 0 for a recording without steps."""
    return min((_first_s(record) for record in recording.steps[:1]), default=0.0)


def last_time_s(recording: Recording) -> float:
    """When the last recorded step had been applied; 0 for a recording without steps."""
    return max((span.end_s for record in recording.steps[-1:] for span in record.host.values()), default=0.0)


def buffers_name(buffers: int) -> str:
    """A, B, C, ... for a set of step buffers, as the articles call them."""
    return chr(ord("A") + buffers)


def _first_s(record: StepRecord) -> float:
    return min(span.start_s for span in record.host.values())


def _without_overlap(found: Sequence[tuple[Span, Lane, StepRecord]]) -> Iterator[LaneSpan]:
    free_s = float("-inf")
    for span, what, record in sorted(found, key=lambda each: each[0]):
        start_s = max(span.start_s, free_s)
        free_s = max(span.end_s, start_s)
        yield LaneSpan(start_s=start_s, end_s=free_s, what=what, record=record)
