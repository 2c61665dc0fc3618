"""Traces keep to the trace-event format: a strict reading of it, and what a viewer would show."""

import io
import json
from collections import defaultdict
from typing import Any

import pytest
from ring_recordings import MS, Durations, ring_recording

from gapless.timeline.idle import IdleCause, idle_report
from gapless.timeline.spans import DeviceLane, HostPhase, Recording
from gapless.timeline.trace_events import write_trace

RECORDINGS = {
    "depth 1": ring_recording(depth=1, num_steps=20),
    "depth 2": ring_recording(depth=2, num_steps=20),
    "depth 3": ring_recording(depth=3, num_steps=20, durations=Durations(compute_s=0.2 * MS)),
    "with sleeps": ring_recording(num_steps=20, sleep_before={7: 50 * MS, 12: 5 * MS}),
    "older steps dropped": ring_recording(num_steps=20, first_step=5000, num_dropped=5000),
    "a single step": ring_recording(num_steps=1),
    "no steps": ring_recording(num_steps=0),
}


def trace_of(recording: Recording) -> dict[str, Any]:
    file = io.StringIO()
    write_trace(recording, file)
    trace = json.loads(file.getvalue(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(trace, dict)
    return trace


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_event(event: dict[str, Any]) -> None:
    """What the format demands of one event, by its phase."""
    assert isinstance(event["name"], str)
    assert event["name"]
    assert all(type(event[key]) is int for key in ("pid", "tid"))
    assert is_number(event["ts"])
    assert event["ts"] >= 0
    match event["ph"]:
        case "X":
            assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
            assert is_number(event["dur"])
            assert event["dur"] >= 0
            assert isinstance(event["args"], dict)
        case "M":
            field = {"name": str, "sort_index": int}
            kind = event["name"].rsplit("_", 1)[1] if event["name"].endswith("_name") else "sort_index"
            assert event["name"] in {"process_name", "thread_name", "process_sort_index", "thread_sort_index"}
            assert set(event["args"]) == {kind}
            assert type(event["args"][kind]) is field[kind]
        case "C":
            assert event["args"]
            assert all(is_number(value) for value in event["args"].values())
        case "s" | "t" | "f":
            assert type(event["id"]) is int
            assert isinstance(event["cat"], str)
            assert event.get("bp") == ("e" if event["ph"] == "f" else None)
        case other:
            pytest.fail(f"phase {other!r}")


def check_slices_nest(events: list[dict[str, Any]]) -> None:
    """On one track each slice begins after the one before it ends, or lies inside it."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in tracks.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6, "two slices of a track overlap"
            open_ends.append(end)


def check_arrows(events: list[dict[str, Any]]) -> None:
    """Each arrow has one start, one stage between and one end, in order of time, and each lies in a slice."""
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            arrows[event["cat"], event["name"], event["id"]].append(event)
    slices = [event for event in events if event["ph"] == "X"]
    for stages in arrows.values():
        in_time = sorted(stages, key=lambda stage: stage["ts"])
        assert [stage["ph"] for stage in in_time] == ["s", "t", "f"]
        for stage in in_time:
            place = stage["pid"], stage["tid"]
            assert any(
                (each["pid"], each["tid"]) == place and each["ts"] <= stage["ts"] <= each["ts"] + each["dur"]
                for each in slices
            )


@pytest.mark.parametrize("name", RECORDINGS)
def test_traces_are_valid(name: str) -> None:
    trace = trace_of(RECORDINGS[name])
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    for event in trace["traceEvents"]:
        check_event(event)
    check_slices_nest(trace["traceEvents"])
    check_arrows(trace["traceEvents"])
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"} <= named
    threads = [tid for _, tid in named]
    assert 0 not in threads
    assert len(set(threads)) == len(threads)


def test_the_judge_sees_slices_that_overlap() -> None:
    slices = [
        {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2.0},
        {"ph": "X", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0},
    ]
    with pytest.raises(AssertionError, match="overlap"):
        check_slices_nest(slices)
    check_slices_nest([slices[0], {**slices[1], "dur": 1.0}])
    check_slices_nest([slices[0], {**slices[1], "tid": 2}])


def test_every_span_of_a_step_is_there_with_its_times() -> None:
    recording = ring_recording(depth=2, num_steps=5)
    events = [event for event in trace_of(recording)["traceEvents"] if event["ph"] == "X"]
    record = recording.steps[3]
    of_step = {event["cat"]: event for event in events if event["args"].get("step") == 3}
    assert set(of_step) == {each.value for each in [*HostPhase, *DeviceLane]}
    origin_s = recording.steps[0].host[HostPhase.SCHEDULE].start_s
    for each, span in [*record.host.items(), *record.device.items()]:
        assert of_step[each.value]["ts"] == pytest.approx((span.start_s - origin_s) * 1e6, abs=1e-3)
        assert of_step[each.value]["dur"] == pytest.approx(span.duration_s * 1e6, abs=2e-3)
    compute = of_step["compute"]
    assert compute["name"] == "step 3 (B)"
    assert compute["args"] == {
        "step": 3,
        "buffers": "B",
        "launch": "graph",
        "requests": 8,
        "tokens": 8,
        "prefill_tokens": 0,
        "sampled": 8,
        "context_tokens": 536,
        "bytes": 200_000_000 + 536 * 23_040,
        # 2.12 ms of reading at 100 GB/s in a step of 4 ms
        "roofline_share": pytest.approx(0.531, abs=1e-3),
    }


def test_idle_slices_have_the_lengths_of_the_causes() -> None:
    recording = ring_recording(depth=1, num_steps=30, sleep_before={9: 50 * MS})
    slices = [event for event in trace_of(recording)["traceEvents"] if event.get("cat") == "idle"]
    report = idle_report(recording)
    for cause in IdleCause:
        expected_s = report.totals.no_work_s if cause is IdleCause.NO_WORK else report.totals.idle_s[cause]
        found_us = sum(event["dur"] for event in slices if event["name"] == cause.value)
        assert found_us == pytest.approx(expected_s * 1e6, abs=0.1)
    assert report.totals.no_work_s > 50 * MS


def test_device_times_that_cross_by_the_clocks_error_do_not_overlap() -> None:
    recording = ring_recording(depth=2, num_steps=4)
    late = recording.steps[1].device[DeviceLane.COMPUTE]
    recording.steps[1].device[DeviceLane.COMPUTE] = late._replace(start_s=late.start_s - 1 * MS)
    check_slices_nest(trace_of(recording)["traceEvents"])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_in_flight_reach_the_depth_and_never_pass_it(depth: int) -> None:
    events = trace_of(ring_recording(depth=depth, num_steps=12))["traceEvents"]
    numbers = [event["args"]["steps"] for event in events if event["name"] == "steps in flight"]
    assert max(numbers) == depth
    assert (min(numbers), numbers[-1]) == (0, 0)
