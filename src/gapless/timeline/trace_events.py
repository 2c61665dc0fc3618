"""A recording in the trace-event format, which ui.perfetto.dev and chrome://tracing open.

One track a lane: the host's thread, the three device queues, and when and why the device was idle. Arrows lead from the
phase that enqueued a step to its computation and on to the phase that applied its results. Slices of one track never
overlap, as the format demands (Trace Event Format, Google, 2016; Perfetto, "Visualizing external trace formats").
Times are in microseconds from the first recorded step, cut to whole nanoseconds.

Events are made one by one, so that a long recording is written without holding them all. Any thread may call it.
"""

import json
from collections.abc import Iterator
from typing import IO, Any, TypeAlias

from gapless.timeline.idle import IdlePart, idle_report
from gapless.timeline.lanes import LaneSpan, buffers_name, device_lane, first_time_s, host_lane
from gapless.timeline.roofline import read_bytes, step_share
from gapless.timeline.spans import DeviceLane, HostPhase, Recording, StepRecord

__all__ = ["TraceEvent", "trace_events", "write_trace"]

TraceEvent: TypeAlias = dict[str, Any]

_HOST, _DEVICE = 1, 2
# The viewers do not show thread 0.
_HOST_THREAD, _IDLE_THREAD = 1, 5
_DEVICE_THREADS = {DeviceLane.H2D: 2, DeviceLane.COMPUTE: 3, DeviceLane.D2H: 4}
_ARROW = {"name": "step", "cat": "step"}


def write_trace(recording: Recording, file: IO[str]) -> None:
    """Write a whole trace as JSON, an event a line."""
    heading = {"displayTimeUnit": "ms", "otherData": _other_data(recording)}
    file.write(json.dumps(heading)[:-1] + ', "traceEvents": [')
    separator = "\n"
    for event in trace_events(recording):
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"
    file.write("\n]}\n")


def trace_events(recording: Recording) -> Iterator[TraceEvent]:
    """Every event of a recording: names of the tracks, slices, arrows, and a counter of the steps in flight."""
    origin_s = first_time_s(recording)
    yield from _names(recording)
    for span in host_lane(recording.steps):
        place = {"pid": _HOST, "tid": _HOST_THREAD}
        slice_ = _slice(span, str(span.what.value), place, origin_s) | {"args": _host_args(span.record)}
        yield slice_
        yield from _host_arrow(span, slice_)
    for lane, thread in _DEVICE_THREADS.items():
        place = {"pid": _DEVICE, "tid": thread}
        for span in device_lane(recording.steps, lane):
            name = f"step {span.record.step} ({buffers_name(span.record.buffers)})"
            slice_ = _slice(span, name, place, origin_s) | {"args": _device_args(span.record, lane, recording)}
            yield slice_
            if lane is DeviceLane.COMPUTE:
                yield _arrow("t", span.record, slice_)
    for part in idle_report(recording).parts:
        yield _idle_slice(part, origin_s)
    yield from _in_flight(recording, origin_s)


def _other_data(recording: Recording) -> dict[str, str]:
    """What viewers show beside the trace; the format allows text only."""
    return {
        "made_by": "gapless",
        "device": recording.limits.device_name,
        "depth": str(recording.depth),
        "clock_error_us": f"{recording.clock_error_s * 1e6:.1f}",
        "dropped_steps": str(recording.num_dropped),
    }


def _names(recording: Recording) -> Iterator[TraceEvent]:
    for pid, name in ((_HOST, "host"), (_DEVICE, f"device: {recording.limits.device_name}")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    threads = [(_HOST, _HOST_THREAD, "engine")]
    threads += [(_DEVICE, thread, lane.value) for lane, thread in _DEVICE_THREADS.items()]
    threads.append((_DEVICE, _IDLE_THREAD, "idle"))
    for pid, tid, name in threads:
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": tid}}


def _slice(span: LaneSpan, name: str, place: dict[str, int], origin_s: float) -> TraceEvent:
    times = _times(span.start_s - origin_s, span.end_s - origin_s)
    return {"ph": "X", "name": name, "cat": str(span.what.value), **place, **times}


def _idle_slice(part: IdlePart, origin_s: float) -> TraceEvent:
    place = {"pid": _DEVICE, "tid": _IDLE_THREAD}
    times = _times(part.span.start_s - origin_s, part.span.end_s - origin_s)
    return {"ph": "X", "name": part.cause.value, "cat": "idle", **place, **times, "args": {}}


def _times(start_s: float, end_s: float) -> dict[str, float]:
    # Start and end are cut to nanoseconds each, and the length follows: slices that touch never overlap by rounding.
    start_ns, end_ns = _nanoseconds(start_s), _nanoseconds(end_s)
    return {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}


def _host_arrow(span: LaneSpan, slice_: TraceEvent) -> Iterator[TraceEvent]:
    if span.what is HostPhase.ENQUEUE:
        yield _arrow("s", span.record, slice_)
    elif span.what is HostPhase.APPLY:
        yield _arrow("f", span.record, slice_) | {"bp": "e"}


def _arrow(ph: str, record: StepRecord, slice_: TraceEvent) -> TraceEvent:
    """A stage of a step's arrow, bound to the slice around its time."""
    return {"ph": ph, **_ARROW, "id": record.step, "pid": slice_["pid"], "tid": slice_["tid"], "ts": slice_["ts"]}


def _host_args(record: StepRecord) -> dict[str, Any]:
    return {"step": record.step, "buffers": buffers_name(record.buffers)}


def _device_args(record: StepRecord, lane: DeviceLane, recording: Recording) -> dict[str, Any]:
    args = _host_args(record)
    if lane is DeviceLane.COMPUTE:
        args |= {
            "launch": record.launch,
            "requests": record.num_entries,
            "tokens": record.num_tokens,
            "prefill_tokens": record.num_prefill_tokens,
            "sampled": record.num_samples,
            "context_tokens": record.num_context_tokens,
            "bytes": read_bytes(record, recording.limits),
        }
        share = step_share(record, recording.limits)
        if share is not None:
            args["roofline_share"] = round(share, 4)
    return args


def _in_flight(recording: Recording, origin_s: float) -> Iterator[TraceEvent]:
    """How many steps the host has enqueued and not yet collected."""
    changes = [(record.host[HostPhase.ENQUEUE].start_s, 1) for record in recording.steps]
    changes += [(record.host[HostPhase.WAIT].end_s, -1) for record in recording.steps]
    number = 0
    for time_s, change in sorted(changes):
        number += change
        at_us = _nanoseconds(time_s - origin_s) / 1000
        yield {"ph": "C", "name": "steps in flight", "pid": _HOST, "tid": 0, "ts": at_us, "args": {"steps": number}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
