"""A recording in numbers and words: each figure against what the chosen durations make it."""

import io

import pytest
from rich.console import Console
from ring_recordings import MS, Durations, ring_recording

from gapless.timeline.advice import Advice, advise
from gapless.timeline.spans import HostPhase, Recording
from gapless.timeline.summary import headline, summarise
from gapless.timeline.summary_table import summary_table

SLOW_HOST = Durations(schedule_s=5 * MS, compute_s=2 * MS)


def printed(recording: Recording) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(summarise(recording)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sums_agree_with_the_clock() -> None:
    recording = ring_recording(depth=1, num_steps=100, sleep_before={40: 0.25})
    summary = summarise(recording)
    idle = summary.idle
    assert idle.busy_s == pytest.approx(100 * 4 * MS)
    assert idle.busy_s + sum(idle.idle_s.values()) == pytest.approx(idle.window_s)
    assert summary.wall_s == pytest.approx(idle.window_s + idle.no_work_s)
    first, last = recording.steps[0].host, recording.steps[-1].host
    assert summary.wall_s == pytest.approx(last[HostPhase.WAIT].end_s - first[HostPhase.WRITE].start_s)
    assert summary.idle_share == pytest.approx(1 - 400 * MS / idle.window_s)


def test_host_time_leaves_waiting_out_and_adds_up_by_phase() -> None:
    late = Durations(apply_s=9 * MS)
    summary = summarise(ring_recording(num_steps=100, odd_steps={10: late, 20: late, 30: late}))
    assert summary.host.median_ms == pytest.approx(1.2)
    assert summary.host.p99_ms > 9
    assert summary.phases[HostPhase.APPLY].p99_ms == pytest.approx(9)
    assert summary.phases[HostPhase.SCHEDULE].median_ms == pytest.approx(0.4)
    working = sum(times.total_s for phase, times in summary.phases.items() if phase is not HostPhase.WAIT)
    assert summary.host.total_s == pytest.approx(working)
    assert summary.compute.median_ms == pytest.approx(4)


def test_launches_and_steps_are_counted() -> None:
    recording = ring_recording(
        num_steps=20, first_step=70, num_dropped=70, launches={70: "kernels", 71: "capture", 72: "kernels"}
    )
    summary = summarise(recording)
    assert summary.launches == {"kernels": 2, "capture": 1, "graph": 17}
    assert (summary.num_steps, summary.num_dropped, summary.depth) == (20, 70, 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_advice_for_a_quick_host_is_depth_2(depth: int) -> None:
    advice = summarise(ring_recording(depth=depth, num_steps=100)).advice
    assert advice is not None
    assert (advice.bound, advice.depth) == ("device", 2)
    assert "host 1.20 ms and the device 4.00 ms" in advice.text


@pytest.mark.parametrize(("depth", "advised"), [(1, 2), (2, 2), (3, 3)])
def test_a_slow_host_is_named_and_no_deeper_ring_is_promised_to_help(depth: int, advised: int) -> None:
    advice = summarise(ring_recording(depth=depth, num_steps=100, durations=SLOW_HOST)).advice
    assert advice is not None
    assert (advice.bound, advice.depth) == ("host", advised)
    assert advice.text.startswith("host-bound")


def advice_for(host_ms: list[float], *, depth: int, idle_share: float) -> Advice:
    host_s = [each * MS for each in host_ms]
    return advise(host_s=host_s, device_s=[4 * MS] * len(host_s), depth=depth, idle_share=idle_share)


def test_a_host_that_is_late_now_and_then_wants_depth_3() -> None:
    jitter = [1.0] * 97 + [9.0] * 3
    assert advice_for(jitter, depth=2, idle_share=0.05).depth == 3
    assert advice_for(jitter, depth=3, idle_share=0.05).depth == 3
    assert advice_for([1.0] * 100, depth=3, idle_share=0.0).depth == 2


def test_idle_time_that_is_not_the_hosts_gets_no_deeper_ring() -> None:
    advice = advice_for([1.0] * 100, depth=2, idle_share=0.3)
    assert advice.depth == 2
    assert "causes" in advice.text


def test_the_table_says_everything_that_matters() -> None:
    text = printed(ring_recording(depth=1, num_steps=100, num_dropped=5, first_step=5, clock_error_s=3.2e-6))
    for words in (
        "device active 74.",
        "100 (5 earlier ones left out), depth 1, on a device",
        "100 as a graph",
        "in 99 decode steps",
        "within 3.2 µs",
        "idle: schedule",
        "idle: apply",
        "ms a step",
        "host waits",
        "device-bound",
    ):
        assert words in text
    causes = [line for line in text.splitlines() if line.startswith("idle: ")]
    bars = [line.count("█") for line in causes]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] > bars[-1] >= 1


def test_no_time_without_requests_is_called_idle() -> None:
    text = printed(ring_recording(num_steps=20, sleep_before={10: 3.0}))
    assert "s of it without any request" in text
    assert "idle: no work" not in text


def test_what_was_not_measured_is_not_claimed() -> None:
    recording = ring_recording(num_steps=20, read_bytes_per_s=None)
    assert summarise(recording).roofline.share is None
    assert "was not measured" in printed(recording)


def test_nothing_recorded_is_said_and_does_not_fail() -> None:
    summary = summarise(ring_recording(num_steps=0))
    assert (summary.advice, summary.wall_s, summary.idle_share) == (None, 0, 0)
    assert headline(summary) == "the timeline holds no steps"
    assert printed(ring_recording(num_steps=0)).strip() == "the timeline holds no steps"
