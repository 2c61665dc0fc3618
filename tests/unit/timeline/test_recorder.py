"""The recorder over a ring: what it keeps, whose times are whose, and that nobody sees half a step."""

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.errors import GaplessError
from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch
from gapless.pipeline.device_step import DeviceStep, StepExecutor
from gapless.pipeline.graphs import GraphedStep
from gapless.pipeline.layout import StepLayout
from gapless.pipeline.padding import StepBuckets, decode_buckets, idle_decode_batch
from gapless.pipeline.ring import Ring
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.cpu import CpuQueues, Delays
from gapless.pipeline.streams.protocol import Event, Queues
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling.sampler import Sampler
from gapless.timeline.idle import idle_report
from gapless.timeline.recorder import TimelineRecorder
from gapless.timeline.roofline import roofline_of
from gapless.timeline.spans import DeviceLane, DeviceLimits, HostPhase, Recording, Span
from simulation.recordings import ClosureRecorder

CPU = torch.device("cpu")
LIMITS = BufferLimits(max_tokens=32, max_rows=8, max_changes=8, max_masked=8)
DEVICE = DeviceLimits(device_name="a device", weight_bytes=1000, kv_bytes_per_token=8, read_bytes_per_s=1e9)


class EchoStep:
    """A device step whose result is the step's input ids; notes when it computed."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.computed: list[Span] = []
        self._work_s = work_s
        self._start_s = 0.0

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        self._start_s = time.perf_counter()
        ids = layout.device(buffers.device_in, "input_ids")
        return ids[layout.device(buffers.device_in, "sample_tokens").to(torch.int64)].clone()

    def sample(self, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        output = buffers.output_view(len(logits))
        output[: len(logits)].copy_(logits)
        output[len(logits) :].fill_(1)
        time.sleep(self._work_s)
        self.computed.append(Span(self._start_s, time.perf_counter()))


class Driver:
    """A ring with a timeline, driven as the engine drives it."""

    def __init__(
        self,
        queues: Queues,
        depth: int,
        *,
        step: StepExecutor | None = None,
        limits: DeviceLimits = DEVICE,
        capacity: int = 1000,
    ) -> None:
        self.recorder = TimelineRecorder(source=queues, device=CPU, depth=depth, limits=limits, capacity=capacity)
        self.ring = Ring(
            queues=queues,
            depth=depth,
            limits=LIMITS,
            device_step=step or EchoStep(),
            timeline=self.recorder,
        )
        self.busy_s: list[float] = []
        self._num_steps = 0

    def submit(self, batch: ScheduledBatch | None = None) -> None:
        """Submit the next step, and collect the oldest one if the ring is full."""
        self.recorder.scheduling()
        self.ring.submit(batch or decode(self._num_steps, 3))
        self._num_steps += 1
        if not self.ring.has_room:
            self.collect()

    def collect(self) -> None:
        """Collect the oldest step."""
        self.busy_s.append(self.ring.collect().result.busy_s)
        self.recorder.applied()

    def run(self, num_steps: int) -> None:
        """Run steps to their ends."""
        for _ in range(num_steps):
            self.submit()
        while self.ring.num_in_flight:
            self.collect()


BUCKETS = StepBuckets(num_rows=8, decode=decode_buckets(8), mixed=(4,))


def decode(step: int, *starts: int) -> ScheduledBatch:
    """One new token for each row, at the given positions."""
    builder = BatchBuilder(step)
    for row, start in enumerate(starts):
        builder.add_token(BatchEntry(row, 0, row, start, 1, True, True, False, 0), 7)
    return BUCKETS.pad(builder.build())


def check_lanes(recording: Recording) -> None:
    """Spans of one lane neither overlap nor go backwards, and those of a step follow each other."""
    host = sorted(span for step in recording.steps for span in step.host.values())
    for lane in [host, *([step.device[lane] for step in recording.steps] for lane in DeviceLane)]:
        assert all(span.duration_s >= 0 for span in lane)
        assert all(before.end_s <= after.start_s for before, after in pairwise(lane))
    for step in recording.steps:
        phases = [step.host[phase] for phase in HostPhase]
        assert all(before.end_s <= after.start_s for before, after in pairwise(phases))


def numbers(recording: Recording) -> list[int]:
    """Of the steps."""
    return [step.step for step in recording.steps]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_time_is_kept_with_its_step(depth: int) -> None:
    queues, step = CpuQueues(), EchoStep(work_s=0.002)
    driver = Driver(queues, depth, step=step)
    driver.run(12)
    recording = driver.recorder.recording()
    queues.close()

    assert numbers(recording) == list(range(12))
    assert [each.buffers for each in recording.steps] == [number % depth for number in range(12)]
    assert (recording.depth, recording.clock_error_s, recording.num_dropped, recording.num_in_flight) == (
        depth,
        0,
        0,
        0,
    )
    check_lanes(recording)
    for each, computed, busy_s in zip(recording.steps, step.computed, driver.busy_s, strict=True):
        compute, d2h = each.device[DeviceLane.COMPUTE], each.device[DeviceLane.D2H]
        assert compute.duration_s == pytest.approx(busy_s, abs=1e-9)
        assert compute.start_s <= computed.start_s <= computed.end_s <= compute.end_s
        assert each.host[HostPhase.ENQUEUE].start_s <= each.device[DeviceLane.H2D].start_s
        assert each.device[DeviceLane.H2D].end_s <= compute.start_s
        assert compute.end_s <= d2h.start_s <= d2h.end_s <= each.host[HostPhase.WAIT].end_s


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_any_order_of_device_work_gives_a_sound_recording(depth: int) -> None:
    for seed in range(60):
        driver = Driver(SimulatorQueues(seed), depth)
        driver.run(9)
        recording = driver.recorder.recording()

        assert numbers(recording) == list(range(9))
        check_lanes(recording)
        totals = idle_report(recording).totals
        assert totals.busy_s + sum(totals.idle_s.values()) == pytest.approx(totals.window_s, abs=1e-9)


def test_memory_is_bounded_and_sums_are_not() -> None:
    queues = CpuQueues()
    driver = Driver(queues, 2, capacity=8)
    driver.run(30)
    recording, totals = driver.recorder.recording(), driver.recorder.totals()
    queues.close()

    assert numbers(recording) == list(range(22, 30))
    assert recording.num_dropped == 22
    check_lanes(recording)
    assert (totals.idle.num_steps, totals.roofline.decode_steps) == (30, 30)
    assert totals.idle.busy_s == pytest.approx(sum(driver.busy_s))
    assert totals.roofline.read_bytes == 30 * (1000 + 4 * 8)
    assert totals.idle.busy_s + sum(totals.idle.idle_s.values()) == pytest.approx(totals.idle.window_s)


def test_sums_are_those_of_the_whole_recording() -> None:
    queues = CpuQueues(Delays(fixed_s={"h2d": 0.001, "compute": 0.001}))
    driver = Driver(queues, 2)
    for _ in range(3):
        driver.run(5)
        driver.recorder.slept()
        time.sleep(0.01)
        driver.recorder.woke()
    recording, totals = driver.recorder.recording(), driver.recorder.totals()
    queues.close()

    assert len(recording.sleeps) == 3
    assert all(sleep.duration_s >= 0.01 for sleep in recording.sleeps)
    assert totals.idle == idle_report(recording).totals
    assert totals.roofline == roofline_of(recording)
    assert totals.idle.no_work_s >= 0.02


def test_readers_choose_where_a_recording_begins() -> None:
    queues = CpuQueues()
    driver = Driver(queues, 1)
    driver.run(6)
    driver.recorder.slept()
    driver.recorder.woke()
    driver.run(4)

    late = driver.recorder.recording(first_step=6)
    assert (numbers(late), late.num_dropped, len(late.sleeps)) == ([6, 7, 8, 9], 6, 1)
    assert idle_report(late).window.start_s == late.steps[0].host[HostPhase.WRITE].start_s, "it began after a sleep"
    middle = driver.recorder.recording(first_step=7)
    assert idle_report(middle).window.start_s == middle.steps[0].device[DeviceLane.COMPUTE].start_s
    assert numbers(driver.recorder.recording(first_step=99)) == []

    driver.recorder.clear()
    assert (numbers(driver.recorder.recording()), driver.recorder.totals().idle.num_steps) == ([], 10)
    driver.run(2)
    after = driver.recorder.recording()
    queues.close()
    assert (numbers(after), after.num_dropped) == ([10, 11], 10)


def test_steps_in_flight_are_counted_and_not_shown() -> None:
    queues = CpuQueues()
    driver = Driver(queues, 3)
    for _ in range(4):
        driver.submit()
    recording = driver.recorder.recording()

    assert (numbers(recording), recording.num_in_flight) == ([0, 1], 2)
    assert idle_report(recording).window.end_s == recording.steps[-1].device[DeviceLane.COMPUTE].end_s
    with pytest.raises(GaplessError, match="2 steps are in flight: measure"):
        driver.recorder.measure_read_bandwidth()
    driver.run(0)
    assert numbers(driver.recorder.recording()) == [0, 1, 2, 3]
    queues.close()


def test_readers_never_see_half_a_step() -> None:
    queues = CpuQueues()
    driver = Driver(queues, 2, capacity=16)
    seen: list[Recording] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(driver.recorder.recording())
            driver.recorder.totals()
            time.sleep(0.0005)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    driver.run(200)
    done.set()
    for reader in readers:
        reader.join()
    queues.close()

    assert len({recording.num_dropped for recording in seen}) > 5, "the readers saw the run go on"
    for recording in seen:
        check_lanes(recording)
        assert len(recording.steps) <= 16
        if recording.steps:
            first = recording.num_dropped
            assert numbers(recording) == list(range(first, first + len(recording.steps)))
            assert all(step.num_tokens == 1 and step.host[HostPhase.SCHEDULE].start_s > 0 for step in recording.steps)


def test_the_warm_up_is_nobodys_step() -> None:
    queues = CpuQueues()
    driver = Driver(queues, 2)
    driver.ring.submit(idle_decode_batch(4, reserved_row=8))
    driver.ring.collect()
    assert (numbers(driver.recorder.recording()), driver.recorder.totals().idle.num_steps) == ([], 0)
    driver.run(2)
    recording = driver.recorder.recording()
    queues.close()
    assert (numbers(recording), recording.num_in_flight) == ([0, 1], 0)


def test_without_a_timeline_nothing_is_recorded_on_the_device() -> None:
    events: list[Event] = []

    class Queues(CpuQueues):
        def event(self) -> Event:
            events.append(super().event())
            return events[-1]

    queues = Queues()
    ring = Ring(queues=queues, depth=1, limits=LIMITS, device_step=EchoStep())
    ring.submit(decode(0, 3))
    ring.collect()
    queues.close()

    assert sum(event.mark is None for event in events) == 2, "the two events of the timeline"


class ClockOfItsOwn(CpuQueues):
    """A device that tells elapsed time only, as float32 milliseconds, by a clock that runs wrong."""

    def elapsed_s(self, start: Event, end: Event) -> float:
        return float(np.float32(super().elapsed_s(start, end) * (1 + 80e-6) * 1e3)) / 1e3

    def host_time_s(self, event: Event) -> float | None:
        return None


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_clock_of_its_own_is_moved_onto_the_hosts(depth: int) -> None:
    queues, step = ClockOfItsOwn(), EchoStep(work_s=0.001)
    driver = Driver(queues, depth, step=step)
    driver.run(20)
    time.sleep(0.1)
    driver.run(20)
    recording = driver.recorder.recording()
    queues.close()

    check_lanes(recording)
    assert 0 < recording.clock_error_s < 1
    for each, computed, busy_s in zip(recording.steps, step.computed, driver.busy_s, strict=True):
        compute, error_s = each.device[DeviceLane.COMPUTE], recording.clock_error_s + 1e-5
        assert compute.start_s - error_s <= computed.start_s
        assert computed.end_s <= compute.end_s + error_s
        # A correction of the clock may cut a span that would overlap the one before it.
        assert compute.duration_s == pytest.approx(busy_s, abs=2 * error_s)
        assert each.host[HostPhase.ENQUEUE].start_s <= each.device[DeviceLane.H2D].start_s
        assert each.device[DeviceLane.D2H].end_s <= each.host[HostPhase.WAIT].end_s + 1e-6


def test_what_a_step_did_is_counted_without_padding() -> None:
    queues = CpuQueues()
    limits = DeviceLimits(
        device_name="a device",
        weight_bytes=1000,
        kv_bytes_per_token=8,
        read_bytes_per_s=1e9,
        window=4,
        window_kv_bytes_per_token=6,
    )
    driver = Driver(queues, 1, limits=limits)
    driver.submit(decode(0, 2, 9, 19))  # padded to 4
    mixed = BatchBuilder(1)
    mixed.add_token(BatchEntry(0, 0, 0, 9, 1, True, True, False, 0), 7)
    mixed.add_token(BatchEntry(1, 0, 1, 5, 1, False, False, False, 0), 7)
    mixed.add_chunk(BatchEntry(2, 0, 2, 8, 3, True, True, False, 0), np.array([1, 2, 3], dtype=np.int32))
    driver.submit(mixed.build())
    decoded, prefilled = driver.recorder.recording().steps
    totals = driver.recorder.totals()
    queues.close()

    assert (decoded.num_entries, decoded.num_tokens, decoded.num_samples, decoded.num_prefill_tokens) == (3, 3, 3, 0)
    assert (decoded.num_context_tokens, decoded.num_window_tokens) == (3 + 10 + 20, 3 + 4 + 4)
    assert (prefilled.num_entries, prefilled.num_tokens, prefilled.num_samples) == (3, 5, 2)
    assert prefilled.num_prefill_tokens == 1 + 3
    # The chunk's first token sees 3 tokens before it, its last ones two more.
    assert (prefilled.num_context_tokens, prefilled.num_window_tokens) == (10 + 6 + 11, 4 + 4 + 6)
    assert (totals.roofline.decode_steps, totals.roofline.read_bytes) == (1, 1000 + 2 * 33 + 6 * 11)


class ConstantModel:
    """Its most likely token is always 5, of a vocabulary of 8."""

    vocab_size = 8

    def forward(self, inputs: ForwardInputs) -> Tensor:
        return self.logits(self.hidden_states(inputs)[inputs.logits_indices])

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        return torch.zeros(len(inputs.positions), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden + torch.eye(8)[5]


def test_how_a_step_was_enqueued_is_told() -> None:
    step = DeviceStep(
        model=ConstantModel(),  # type: ignore[arg-type]
        sampler=Sampler(max_rows=8, device=CPU),
        max_rows=8,
        max_blocks_per_row=8,
        block_size=4,
        device=CPU,
    )
    queues = CpuQueues()
    driver = Driver(queues, 2, step=GraphedStep(step, ClosureRecorder(), BUCKETS))
    batches: Sequence[ScheduledBatch] = [decode(0, 3), decode(1, 4), decode(2, 5), decode(3, 6)]
    for batch in batches:
        driver.submit(batch)
    for index in range(4):
        chunk = BatchBuilder(4 + index)
        chunk.add_chunk(BatchEntry(2, 0, 2, 8, 3, True, True, False, 0), np.array([1, 2, 3], dtype=np.int32))
        driver.submit(BUCKETS.pad(chunk.build()) if index else chunk.build())
    driver.run(0)
    recording = driver.recorder.recording()
    queues.close()

    assert [each.launch for each in recording.steps] == [
        *("capture", "capture", "graph", "graph"),
        *("kernels", "capture", "capture", "graph"),
    ]
    assert [each.num_tokens for each in recording.steps[4:]] == [3, 3, 3, 3]
