"""Idle time by cause: every moment of a gap has one cause, and the sums are exact."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_recordings import MS, START_S, Durations, ring_recording

from gapless.timeline.idle import IdleCause, IdleMeter, IdleReport, IdleTotals, idle_report, metered
from gapless.timeline.spans import DeviceLane, HostPhase, Recording, Span, StepRecord


def step(number: int, **spans: tuple[float, float]) -> StepRecord:
    """A step by the milliseconds of its spans; a phase that is left out takes no time, after those before it."""
    last = 0.0
    found = {}
    for phase in HostPhase:
        start, end = spans.get(phase.value, (last, last))
        found[phase] = Span(START_S + start * MS, START_S + end * MS)
        last = end
    device = {
        lane: Span(START_S + spans[lane.value][0] * MS, START_S + spans[lane.value][1] * MS) for lane in DeviceLane
    }
    return replace(ring_recording(num_steps=1).steps[0], step=number, host=found, device=device)


def recording(*steps: StepRecord, **changes: object) -> Recording:
    """A recording of these steps."""
    return replace(ring_recording(num_steps=1), steps=steps, **changes)


def parts_ms(report: IdleReport) -> list[tuple[float, float, str]]:
    """The parts of gaps in milliseconds since the start."""
    return [
        (round((part.span.start_s - START_S) / MS, 6), round((part.span.end_s - START_S) / MS, 6), part.cause.value)
        for part in report.parts
    ]


def idle_ms(totals: IdleTotals) -> dict[str, float]:
    """The causes that took time, in milliseconds."""
    return {cause.value: round(seconds / MS, 6) for cause, seconds in totals.idle_s.items() if seconds}


SYNCHRONOUS = (
    step(
        0,
        schedule=(0, 1),
        write=(1, 2),
        enqueue=(2, 3),
        wait=(3, 9),
        apply=(9, 11),
        h2d=(2.5, 3.5),
        compute=(4, 8),
        d2h=(8, 8.5),
    ),
    step(
        1,
        schedule=(12, 14),
        write=(14, 15),
        enqueue=(15, 16),
        wait=(16, 22),
        apply=(22, 23),
        h2d=(15.2, 15.6),
        compute=(16.5, 21),
        d2h=(21, 21.5),
    ),
)


def test_a_synchronous_gap_is_split_by_what_the_host_did() -> None:
    report = idle_report(recording(*SYNCHRONOUS))

    assert parts_ms(report) == [
        (1, 2, "write"),
        (2, 2.5, "enqueue"),
        (2.5, 3.5, "inputs"),
        (3.5, 4, "launch"),
        (8, 9, "results"),
        (9, 11, "apply"),
        (11, 12, "host other"),
        (12, 14, "schedule"),
        (14, 15, "write"),
        (15, 15.2, "enqueue"),
        (15.2, 15.6, "inputs"),
        (15.6, 16, "enqueue"),
        (16, 16.5, "launch"),
        (21, 22, "results"),
    ]
    assert report.window == Span(START_S + 1 * MS, START_S + 22 * MS)
    assert report.totals.busy_s == pytest.approx(8.5 * MS)
    assert report.totals.device_active == pytest.approx(8.5 / 21)
    assert idle_ms(report.totals) == {
        "schedule": 2,
        "write": 2,
        "enqueue": 1.1,
        "results": 2,
        "apply": 2,
        "host other": 1,
        "inputs": 1.4,
        "launch": 1,
    }


def test_a_step_that_waits_on_the_device_costs_launch_latency_only() -> None:
    overlapped = (
        step(
            0, write=(0, 1), enqueue=(1, 2), wait=(4, 11), apply=(11, 12), h2d=(1, 1.5), compute=(2, 10), d2h=(10, 10.5)
        ),
        step(
            1,
            schedule=(2, 3),
            write=(3, 3.5),
            enqueue=(3.5, 4),
            wait=(12, 19),
            h2d=(4, 4.5),
            compute=(10.1, 18),
            d2h=(18, 19),
        ),
    )
    report = idle_report(recording(*overlapped, num_in_flight=1))

    assert parts_ms(report) == [(0, 1, "write"), (1, 1.5, "inputs"), (1.5, 2, "enqueue"), (10, 10.1, "launch")]
    assert report.window.end_s == START_S + 18 * MS, "a step is in flight, so the device may compute after 18 ms"


def test_late_inputs_are_the_cause_when_the_host_was_early() -> None:
    late = (
        step(0, write=(0, 1), enqueue=(1, 2), wait=(4, 11), h2d=(1, 2), compute=(2, 10), d2h=(10, 10.5)),
        step(
            1,
            schedule=(2, 3),
            write=(3, 3.5),
            enqueue=(3.5, 4),
            wait=(11, 19),
            h2d=(4, 13),
            compute=(14, 18),
            d2h=(18, 19),
        ),
    )
    totals = idle_report(recording(*late)).totals

    assert idle_ms(totals) == {"write": 1, "inputs": 4, "launch": 1, "results": 1}


def test_sleeps_are_no_work_and_in_no_sum() -> None:
    slept = Span(START_S + 11.5 * MS, START_S + 11.9 * MS)
    report = idle_report(recording(*SYNCHRONOUS, sleeps=(slept,)))

    assert (9, 14, "no work") in parts_ms(report)
    assert report.totals.no_work_s == pytest.approx(5 * MS)
    assert report.totals.window_s == pytest.approx(16 * MS)
    assert report.window.duration_s == pytest.approx(21 * MS)
    assert idle_ms(report.totals)["results"] == 2


def test_what_was_before_the_kept_steps_is_not_counted() -> None:
    dropped = idle_report(recording(*SYNCHRONOUS, num_dropped=7))
    assert dropped.window.start_s == START_S + 4 * MS
    assert parts_ms(dropped)[0] == (8, 9, "results")

    asleep_before = (Span(START_S - 5 * MS, START_S - 1 * MS),)
    assert idle_report(recording(*SYNCHRONOUS, num_dropped=7, sleeps=asleep_before)).window.start_s == START_S + MS


def test_an_empty_recording_has_nothing() -> None:
    report = idle_report(recording())

    assert report.window == Span(0.0, 0.0)
    assert report.parts == ()
    assert (report.totals.num_steps, report.totals.window_s, report.totals.device_active) == (0, 0.0, None)
    assert set(report.totals.idle_s) == set(IdleCause) - {IdleCause.NO_WORK}


def durations() -> st.SearchStrategy[Durations]:
    """Of a step: from nothing to 20 ms each."""
    seconds = st.one_of(st.just(0.0), st.floats(1e-7, 0.02))
    return st.builds(
        Durations,
        schedule_s=seconds,
        write_s=seconds,
        enqueue_s=seconds,
        apply_s=seconds,
        h2d_s=seconds,
        compute_s=seconds,
        d2h_s=seconds,
    )


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """What rings of any depth do with steps of any durations, with sleeps, cut at any place."""
    num_steps = draw(st.integers(1, 12))
    numbers = st.integers(0, num_steps - 1)
    odd: Mapping[int, Durations] = draw(st.dictionaries(numbers, durations()))
    sleeps: Mapping[int, float] = draw(st.dictionaries(numbers, st.floats(1e-6, 5.0), max_size=3))
    made = ring_recording(
        depth=draw(st.integers(1, 4)),
        num_steps=num_steps,
        durations=draw(durations()),
        odd_steps=odd,
        sleep_before=sleeps,
    )
    first, last = sorted((draw(st.integers(0, num_steps)), draw(st.integers(0, num_steps))))
    return replace(
        made,
        steps=made.steps[first:last],
        num_dropped=first,
        num_in_flight=num_steps - last,
        sleeps=tuple(
            sleep
            for sleep in made.sleeps
            if not first or sleep.start_s > made.steps[first - 1].host[HostPhase.WAIT].end_s
        ),
    )


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(recordings())
def test_busy_time_and_causes_add_up_to_the_window(made: Recording) -> None:
    report = idle_report(made)
    totals = report.totals

    assert totals.num_steps == len(made.steps)
    assert min(totals.idle_s.values()) >= 0
    assert totals.busy_s + sum(totals.idle_s.values()) == pytest.approx(totals.window_s, abs=1e-9)
    assert totals.window_s + totals.no_work_s == pytest.approx(report.window.duration_s, abs=1e-9)
    compute_s = sum(each.device[DeviceLane.COMPUTE].duration_s for each in made.steps)
    assert totals.busy_s == pytest.approx(compute_s, abs=1e-9)
    for cause in IdleCause:
        of_parts_s = sum(part.span.duration_s for part in report.parts if part.cause is cause)
        assert of_parts_s == pytest.approx((totals.idle_s | {IdleCause.NO_WORK: totals.no_work_s})[cause], abs=1e-9)


@settings(derandomize=True, database=None, deadline=None, max_examples=150)
@given(recordings())
def test_parts_and_compute_spans_tile_the_window(made: Recording) -> None:
    report = idle_report(made)
    tiles = sorted([*(part.span for part in report.parts), *(each.device[DeviceLane.COMPUTE] for each in made.steps)])

    assert all(part.span.duration_s >= 0 for part in report.parts)
    assert [part.span for part in report.parts] == sorted(part.span for part in report.parts)
    for before, after in pairwise(tiles):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-9)
    if tiles:
        assert (tiles[0].start_s, tiles[-1].end_s) == pytest.approx(report.window, abs=1e-9)


@settings(derandomize=True, database=None, deadline=None, max_examples=100)
@given(recordings())
def test_a_meter_holds_little_and_knows_every_moment(made: Recording) -> None:
    meter = IdleMeter()
    for counted in metered(made, meter):
        totals = meter.totals()
        assert totals.busy_s + sum(totals.idle_s.values()) == pytest.approx(totals.window_s, abs=1e-9)
        assert counted.grown_s >= counted.record.device[DeviceLane.COMPUTE].duration_s - 1e-9
        assert len(meter.pending) <= 5 * (made.depth + 1)
    assert meter.totals() == idle_report(made).totals


def test_totals_since_an_earlier_moment() -> None:
    made = ring_recording(depth=2, num_steps=20)
    meter = IdleMeter()
    moments = [meter.totals()]
    for _ in metered(made, meter):
        moments.append(meter.totals())
    added = moments[15].since(moments[10])

    assert added.num_steps == 5
    assert added.busy_s == pytest.approx(5 * 4 * MS)
    assert added.busy_s + sum(added.idle_s.values()) == pytest.approx(added.window_s)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_late_host_is_seen_at_depth_1_and_hidden_above(depth: int) -> None:
    made = ring_recording(depth=depth, num_steps=40, durations=Durations(schedule_s=2 * MS, compute_s=6 * MS))
    late_ms = idle_ms(idle_report(made).totals).get("schedule", 0)

    # 39 gaps; the first step's schedule comes before the first submit.
    assert late_ms == pytest.approx(39 * 2 if depth == 1 else 0, abs=0.01)
