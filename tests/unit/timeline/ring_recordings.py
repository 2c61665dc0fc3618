"""Recordings for tests: the ring's own rules on chosen durations, so that times in them can be worked out by hand."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from gapless.timeline.spans import DeviceLane, DeviceLimits, HostPhase, Launch, Recording, Span, StepRecord

MS = 1e-3
START_S = 1000.0  # a clock never starts at zero


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Of one step, in seconds."""

    schedule_s: float = 0.4 * MS
    write_s: float = 0.2 * MS
    enqueue_s: float = 0.2 * MS
    apply_s: float = 0.4 * MS
    h2d_s: float = 0.1 * MS
    compute_s: float = 4.0 * MS
    d2h_s: float = 0.1 * MS


def ring_recording(
    *,
    depth: int = 2,
    num_steps: int = 50,
    durations: Durations | None = None,
    odd_steps: Mapping[int, Durations] | None = None,
    sleep_before: Mapping[int, float] | None = None,
    launches: Mapping[int, Launch] | None = None,
    num_rows: int = 8,
    num_prefills: int = 1,
    read_bytes_per_s: float | None = 100e9,
    clock_error_s: float = 2e-6,
    num_dropped: int = 0,
    first_step: int = 0,
) -> Recording:
    """What a ring of ``depth`` does with steps that last ``durations``.

    Args:
        odd_steps: durations of single steps.
        sleep_before: seconds that the engine sleeps, with nothing in flight, before a step.
        launches: of single steps; the others are a graph's replay.
        num_prefills: the first steps are prefills.
    """
    usual, sleeps = durations or Durations(), dict(sleep_before or {})
    host_s, lanes = START_S, dict.fromkeys(DeviceLane, START_S)
    waiting: deque[StepRecord] = deque()
    done: list[StepRecord] = []
    slept: list[Span] = []

    def spent(seconds: float) -> Span:
        nonlocal host_s
        span = Span(host_s, host_s + seconds)
        host_s = span.end_s
        return span

    def on_lane(lane: DeviceLane, after_s: float, seconds: float) -> Span:
        start_s = max(after_s, lanes[lane])
        lanes[lane] = start_s + seconds
        return Span(start_s, lanes[lane])

    def submit(number: int, lasts: Durations) -> None:
        host = {
            HostPhase.SCHEDULE: spent(lasts.schedule_s),
            HostPhase.WRITE: spent(lasts.write_s),
            HostPhase.ENQUEUE: spent(lasts.enqueue_s),
        }
        h2d = on_lane(DeviceLane.H2D, host_s, lasts.h2d_s)
        compute = on_lane(DeviceLane.COMPUTE, h2d.end_s, lasts.compute_s)
        d2h = on_lane(DeviceLane.D2H, compute.end_s, lasts.d2h_s)
        prefill = number - first_step < num_prefills
        waiting.append(
            StepRecord(
                step=number,
                buffers=number % depth,
                host=host,
                device={DeviceLane.H2D: h2d, DeviceLane.COMPUTE: compute, DeviceLane.D2H: d2h},
                num_entries=num_rows,
                num_tokens=num_rows * (64 if prefill else 1),
                num_prefill_tokens=num_rows * 64 if prefill else 0,
                num_samples=num_rows,
                num_context_tokens=num_rows * (64 + number),
                launch=(launches or {}).get(number, "graph"),
            )
        )

    def collect(lasts: Durations) -> None:
        record = waiting.popleft()
        wait = spent(max(0.0, record.device[DeviceLane.D2H].end_s - host_s))
        done.append(_with_phases(record, wait, spent(lasts.apply_s)))

    for number in range(first_step, first_step + num_steps):
        lasts = (odd_steps or {}).get(number, usual)
        if number in sleeps:
            while waiting:
                collect(usual)
            slept.append(spent(sleeps[number]))
        submit(number, lasts)
        if len(waiting) == depth:
            collect(lasts)
    while waiting:
        collect(usual)
    limits = DeviceLimits(
        device_name="a device",
        weight_bytes=200_000_000,
        kv_bytes_per_token=23_040,
        read_bytes_per_s=read_bytes_per_s,
    )
    return Recording(
        steps=tuple(done),
        sleeps=tuple(slept),
        depth=depth,
        limits=limits,
        clock_error_s=clock_error_s,
        num_dropped=num_dropped,
    )


def _with_phases(record: StepRecord, wait: Span, apply: Span) -> StepRecord:
    return StepRecord(
        step=record.step,
        buffers=record.buffers,
        host={**record.host, HostPhase.WAIT: wait, HostPhase.APPLY: apply},
        device=record.device,
        num_entries=record.num_entries,
        num_tokens=record.num_tokens,
        num_prefill_tokens=record.num_prefill_tokens,
        num_samples=record.num_samples,
        num_context_tokens=record.num_context_tokens,
        launch=record.launch,
    )
