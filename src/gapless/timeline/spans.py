"""The words of the timeline: what is remembered of each step, and of a whole recording.

All times are seconds on the host's monotonic clock, ``time.perf_counter``, device times included: they are moved onto
it by whoever records them, and ``Recording.clock_error_s`` says how far they may be off. Everything here is an
immutable value; any thread may read it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

__all__ = ["DeviceLane", "DeviceLimits", "HostPhase", "Launch", "Recording", "Span", "StepRecord"]


class HostPhase(Enum):
    """What the engine's thread does for a step, in this order."""

    SCHEDULE = "schedule"
    WRITE = "write"
    ENQUEUE = "enqueue"
    WAIT = "wait"
    APPLY = "apply"


class DeviceLane(Enum):
    """The device's three queues."""

    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"


Launch = Literal["kernels", "graph", "capture"]
"""How a step's compute was enqueued: by kernel, as a graph's replay, or by kernel and captured right after."""


class Span(NamedTuple):
    """From ``start_s`` to ``end_s``."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds; never negative."""
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """A step that has come back.

    Attributes:
        step: its number.
        buffers: which set of step buffers it used, from 0 to depth - 1.
        host: one span for each phase.
        device: one span for each lane. That of compute starts after the step's last stream wait.
        num_entries: requests in it, padding not counted.
        num_tokens: new tokens, padding not counted.
        num_prefill_tokens: those of entries with more than one new token or none sampled.
        num_samples: tokens it sampled.
        num_context_tokens: the sum of its entries' context lengths, this step's tokens included: what attention reads.
        launch: how its compute was enqueued.
        num_window_tokens: the same sum with each entry's context cut to what a layer with a sliding window reads.
    """

    step: int
    buffers: int
    host: dict[HostPhase, Span]
    device: dict[DeviceLane, Span]
    num_entries: int
    num_tokens: int
    num_prefill_tokens: int
    num_samples: int
    num_context_tokens: int
    launch: Launch
    num_window_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLimits:
    """What a step must read at least, and how fast this device reads.

    Attributes:
        device_name: of the hardware.
        weight_bytes: of all matrices and norms that every step reads.
        kv_bytes_per_token: of K and V of one token in all layers.
        read_bytes_per_s: measured on this device; ``None`` where nobody measured.
        window: keys that a token sees in layers with a sliding window; ``None`` where no layer has one.
        window_kv_bytes_per_token: the part of ``kv_bytes_per_token`` that belongs to such layers.
    """

    device_name: str
    weight_bytes: int
    kv_bytes_per_token: int
    read_bytes_per_s: float | None
    window: int | None = None
    window_kv_bytes_per_token: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a recorder holds: the latest steps, oldest first, without gaps in their numbers.

    Attributes:
        steps: those that have come back.
        sleeps: when the engine slept for want of requests, in order; one right before the first step is among them.
        depth: most steps in flight.
        limits: of the device, for shares of the roofline.
        clock_error_s: how far device times may be off the host's clock.
        num_dropped: older steps that the bounded memory has let go.
        num_in_flight: steps that had not come back yet.
    """

    steps: tuple[StepRecord, ...]
    sleeps: tuple[Span, ...]
    depth: int
    limits: DeviceLimits
    clock_error_s: float
    num_dropped: int
    num_in_flight: int = 0
