"""The timeline of a real engine on a CPU: a delay that is put in somewhere shows under its own cause, and nowhere else.

Delays are compared with what they took, which on a busy machine is more than was asked for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless import LLM, SamplingParams
from gapless.config import EngineConfig
from gapless.engine.assembly import build_engine
from gapless.engine.request import EngineRequest
from gapless.engine.results import RequestUpdate, ResultApplier
from gapless.engine.scheduler import Scheduler
from gapless.errors import ConfigError, EngineDeadError
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.layout import StepLayout
from gapless.pipeline.step_buffers import StepBuffers
from gapless.pipeline.streams.cpu import CpuStream, Delays
from gapless.timeline.activity import ActivitySnapshot
from gapless.timeline.idle import IdleCause, IdleTotals, idle_report
from gapless.timeline.recorder import TimelineTotals
from gapless.timeline.spans import DeviceLane, HostPhase, Recording, StepRecord

DELAY_S = 0.005
PHASES = {
    IdleCause.SCHEDULE: HostPhase.SCHEDULE,
    IdleCause.WRITE: HostPhase.WRITE,
    IdleCause.ENQUEUE: HostPhase.ENQUEUE,
    IdleCause.RESULTS: HostPhase.WAIT,
    IdleCause.APPLY: HostPhase.APPLY,
}


class Ends:
    """Waits for the ends of requests."""

    def __init__(self) -> None:
        self.wanted = 0
        self.done = threading.Event()

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Count."""
        self.wanted -= sum(update.finish_reason is not None for update in updates)
        if self.wanted == 0:
            self.done.set()

    def engine_died(self, error: EngineDeadError) -> None:
        """Stop waiting; the test fails for want of results."""
        self.done.set()


class Run:
    """Requests on a tiny model, and what the timeline says of them once the engine is idle."""

    def __init__(
        self,
        *,
        depth: int,
        bursts: int = 1,
        num_tokens: int = 16,
        fixed_s: dict[str, float] | None = None,
        on_submit: Callable[[ScheduledBatch], None] = lambda batch: None,
    ) -> None:
        ends = Ends()
        config = EngineConfig(depth=depth, device="cpu", load_format="dummy", num_blocks=64, timeline=True)
        delays = Delays(fixed_s=fixed_s or {})
        built = build_engine("tiny-llama", config, ends, delays=delays, on_submit=on_submit)
        timeline = built.engine.timeline
        assert timeline is not None
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        try:
            for burst in range(bursts):
                ends.wanted, ends.done = 2, threading.Event()
                prompts = ([1, 2, 3, burst], [4, 5, burst])
                requests = [EngineRequest(prompt_token_ids=prompt, params=params) for prompt in prompts]
                built.engine.submit(requests, lambda ids: None)
                assert ends.done.wait(60)
                built.engine.check_alive()
        finally:
            built.engine.shutdown()
        self.recording: Recording = timeline.recording()
        self.totals: TimelineTotals = timeline.totals()
        self.activity: ActivitySnapshot = built.engine.counters().device
        self.report = idle_report(self.recording)

    @property
    def idle(self) -> IdleTotals:
        """Idle time by cause."""
        return self.report.totals

    def phase_s(self, phase: HostPhase, first: int = 0) -> float:
        """Seconds that the host spent in a phase, from a step on."""
        return sum(step.host[phase].duration_s for step in self.recording.steps[first:])

    def lane_s(self, lane: DeviceLane) -> float:
        """Seconds that a lane worked."""
        return sum(step.device[lane].duration_s for step in self.recording.steps)


class Sleeper:
    """Sleeps, and notes how long it really was."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def __call__(self, *args: Any) -> None:
        start_s = time.perf_counter()
        time.sleep(DELAY_S)
        self.slept_s.append(time.perf_counter() - start_s)


@contextmanager
def delayed(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> Iterator[Sleeper]:
    """Every call of a method sleeps first."""
    sleeper = Sleeper()
    original = getattr(owner, method)

    def late(*args: Any, **kwargs: Any) -> Any:
        sleeper()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, late)
        yield sleeper


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_busy_time_and_causes_are_the_wall_clock(depth: int) -> None:
    run = Run(depth=depth, bursts=3)

    assert len(run.recording.steps) >= 3 * 16
    assert run.recording.num_in_flight == 0
    assert [step.step for step in run.recording.steps] == list(range(len(run.recording.steps)))
    # From the first submit to the last collect, with the times without work in between.
    first, last = run.recording.steps[0], run.recording.steps[-1]
    wall_s = last.host[HostPhase.WAIT].end_s - first.host[HostPhase.WRITE].start_s
    assert run.idle.busy_s + sum(run.idle.idle_s.values()) + run.idle.no_work_s == pytest.approx(wall_s, rel=1e-6)
    assert run.idle.no_work_s > 0
    assert run.totals.idle == run.idle, "the sums of a life are those of a recording that holds all of it"


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_lanes_are_in_order(depth: int) -> None:
    run = Run(depth=depth, bursts=2)
    host = sorted(span for step in run.recording.steps for span in step.host.values())
    host += [sleep for sleep in run.recording.sleeps if sleep.start_s > host[0].start_s]

    for lane in [sorted(host), *([step.device[lane] for step in run.recording.steps] for lane in DeviceLane)]:
        assert all(span.duration_s >= 0 for span in lane)
        assert all(before.end_s <= after.start_s for before, after in pairwise(lane))


@pytest.mark.parametrize("depth", [1, 2])
def test_device_active_is_what_the_engine_counts(depth: int) -> None:
    run = Run(depth=depth, bursts=2, fixed_s={"compute": 0.01})

    assert run.idle.busy_s == pytest.approx(run.activity.busy_s, rel=1e-6)
    assert run.idle.window_s == pytest.approx(run.activity.window_s, rel=0.03)
    assert run.idle.device_active == pytest.approx(run.activity.active_share, rel=0.03)


PLACES = [
    (IdleCause.SCHEDULE, Scheduler, "schedule"),
    (IdleCause.WRITE, StepBuffers, "write"),
    # Called before a step's compute, which has to wait for its inputs, and before the copy of its results.
    (IdleCause.ENQUEUE, CpuStream, "wait"),
    (IdleCause.APPLY, ResultApplier, "apply"),
]


@pytest.mark.parametrize(("cause", "owner", "method"), PLACES, ids=lambda value: getattr(value, "value", ""))
def test_a_late_host_is_the_cause_at_depth_1(
    monkeypatch: pytest.MonkeyPatch, cause: IdleCause, owner: type, method: str
) -> None:
    with delayed(monkeypatch, owner, method) as sleeper:
        run = Run(depth=1)

    of_steps_s = sleeper.slept_s[:: len(sleeper.slept_s) // len(run.recording.steps)]
    assert len(of_steps_s) == len(run.recording.steps)
    # What comes before the first submit, and after the last collect, is outside of the window.
    assert run.idle.idle_s[cause] >= sum(of_steps_s) - max(of_steps_s) - 0.001
    assert run.idle.idle_s[cause] <= run.phase_s(PHASES[cause]) + 1e-6
    for other in PHASES.keys() - {cause}:
        assert run.idle.idle_s[other] <= run.phase_s(PHASES[other]) + 1e-6
    assert run.phase_s(PHASES[cause]) >= sum(sleeper.slept_s)


def test_a_slow_listener_before_the_submit_counts_as_schedule() -> None:
    sleeper = Sleeper()
    run = Run(depth=1, on_submit=sleeper)

    assert run.idle.idle_s[IdleCause.SCHEDULE] >= sum(sleeper.slept_s[1:]) - 0.001
    assert run.idle.idle_s[IdleCause.SCHEDULE] <= run.phase_s(HostPhase.SCHEDULE, first=1) + 1e-6


@pytest.mark.parametrize(("cause", "owner", "method"), PLACES, ids=lambda value: getattr(value, "value", ""))
def test_at_depth_2_a_late_host_is_hidden_behind_a_longer_step(
    monkeypatch: pytest.MonkeyPatch, cause: IdleCause, owner: type, method: str
) -> None:
    with delayed(monkeypatch, owner, method) as sleeper:
        run = Run(depth=2, fixed_s={"compute": 0.02})

    # The first step of a run has nothing to hide behind.
    num_first = len(sleeper.slept_s) // len(run.recording.steps)
    first_s, others_s = sum(sleeper.slept_s[:num_first]), sum(sleeper.slept_s[num_first:])
    assert run.phase_s(PHASES[cause], first=1) >= others_s - 0.001
    assert run.idle.idle_s[cause] - first_s < 0.2 * others_s


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_inputs_are_the_cause_unless_a_step_hides_them(depth: int) -> None:
    run = Run(depth=depth, fixed_s={"h2d": DELAY_S, "compute": 0.02})
    inputs_s, copies_s = run.idle.idle_s[IdleCause.INPUTS], run.lane_s(DeviceLane.H2D)

    assert copies_s >= len(run.recording.steps) * DELAY_S
    if depth == 1:
        assert inputs_s == pytest.approx(copies_s, rel=1e-6)
    else:
        assert inputs_s - run.recording.steps[0].device[DeviceLane.H2D].duration_s < 0.2 * copies_s


@pytest.mark.parametrize("depth", [1, 2])
def test_slow_results_are_the_cause_unless_a_step_hides_them(depth: int) -> None:
    run = Run(depth=depth, fixed_s={"d2h": DELAY_S, "compute": 0.02})
    results_s, copies_s = run.idle.idle_s[IdleCause.RESULTS], run.lane_s(DeviceLane.D2H)

    assert copies_s >= len(run.recording.steps) * DELAY_S
    if depth == 1:
        assert copies_s - 1e-6 <= results_s <= run.phase_s(HostPhase.WAIT)
    else:
        assert results_s - run.recording.steps[-1].device[DeviceLane.D2H].duration_s < 0.3 * copies_s


class Profiled:
    """Profiles the compute worker, which works for the given engine's steps; the marks tell the steps apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_steps: int) -> None:
        self._num_steps = num_steps
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
        self._steps = 0
        forward, sample = DeviceStep.forward, DeviceStep.sample

        def first(step: DeviceStep, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
            if not self._steps:
                self._profile.start()
            self._steps += 1
            return forward(step, batch, layout, buffers)

        def last(
            step: DeviceStep, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers
        ) -> None:
            sample(step, logits, batch, layout, buffers)
            with torch.profiler.record_function("the step's end"):
                pass
            if self._steps == self._num_steps:
                self._profile.stop()

        monkeypatch.setattr(DeviceStep, "forward", first)
        monkeypatch.setattr(DeviceStep, "sample", last)

    def busy_s(self) -> list[float]:
        """From the first operation of a step to the end of its last one, in seconds.

        The profiler is started in the first step and stopped in the last one, so these two are left out.
        """
        spans: list[float] = []
        start_us = end_us = None
        for event in sorted(self._profile.events(), key=lambda event: event.time_range.start):
            if event.name == "the step's end":
                assert start_us is not None
                assert end_us is not None
                spans.append((end_us - start_us) * 1e-6)
                start_us = end_us = None
            elif event.name.startswith("aten::"):
                start_us = event.time_range.start if start_us is None else start_us
                end_us = max(end_us or 0.0, event.time_range.end)
        return spans[1:-1]


def test_compute_spans_agree_with_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    profiled = Profiled(monkeypatch, num_steps=10)
    ends = Ends()
    config = EngineConfig(depth=1, device="cpu", load_format="dummy", num_blocks=64, timeline=True)
    built = build_engine("smollm2-135m", config, ends)
    timeline = built.engine.timeline
    assert timeline is not None
    ends.wanted = 1
    params = SamplingParams(temperature=0, max_tokens=10)
    built.engine.submit([EngineRequest(prompt_token_ids=[1, 2, 3], params=params)], lambda ids: None)
    assert ends.done.wait(120)
    built.engine.shutdown()
    steps: tuple[StepRecord, ...] = timeline.recording().steps[1:-1]
    ours_s = [step.device[DeviceLane.COMPUTE].duration_s for step in steps]
    theirs_s = profiled.busy_s()

    assert len(ours_s) == len(theirs_s) == 8
    assert sum(theirs_s) == pytest.approx(sum(ours_s), rel=0.05)


def test_llm_hands_out_its_timeline() -> None:
    with LLM("tiny-llama", device="cpu", load_format="dummy", num_blocks=64, timeline=True) as llm:
        timeline = llm.timeline
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))
        assert len(timeline.recording().steps) == 5, "all of them, right after the call"
        assert timeline.recording().limits.read_bytes_per_s is None
        bandwidth = timeline.measure_read_bandwidth()
        assert timeline.recording().limits.read_bytes_per_s == bandwidth > 1e8
        share = timeline.totals().roofline.share
        assert share is not None
        assert 0 < share < 1
    assert llm.timeline is timeline
    assert len(timeline.recording().steps) == 5

    off = LLM("tiny-llama", device="cpu", load_format="dummy", num_blocks=64)
    with off, pytest.raises(ConfigError, match="timeline=False"):
        _ = off.timeline
