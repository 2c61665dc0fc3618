"""The ring: steps in flight, their order, what is copied, and the one place where the host waits."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch
from gapless.pipeline.layout import StepLayout
from gapless.pipeline.ring import Ring
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.cpu import CpuQueues, Delays
from gapless.pipeline.streams.protocol import Queues
from gapless.pipeline.streams.simulator import SimulatorQueues

_LIMITS = BufferLimits(max_tokens=16, max_rows=4, max_changes=8, max_masked=4)


class _EchoStep:
    """A device step whose result is the step's input ids plus 100; the last one is unhealthy."""

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        ids = layout.device(buffers.device_in, "input_ids")
        return ids[layout.device(buffers.device_in, "sample_tokens").to(torch.int64)].clone()

    def sample(self, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        if len(logits):
            output = buffers.output_view(len(logits))
            output[: len(logits)].copy_(logits + 100)
            output[len(logits) :].fill_(1)
            output[-1] = 0


def _batch(step: int, *ids: int) -> ScheduledBatch:
    builder = BatchBuilder(step)
    for row, token in enumerate(ids):
        builder.add_token(BatchEntry(row, 0, row, 0, 1, True, True, False, 0), token)
    return builder.build()


def _ring(queues: Queues, depth: int) -> Ring:
    return Ring(queues=queues, depth=depth, limits=_LIMITS, device_step=_EchoStep())


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_steps_come_back_oldest_first(depth: int) -> None:
    for seed in range(20):
        ring = _ring(SimulatorQueues(seed), depth)
        collected = []
        for step in range(9):
            ring.submit(_batch(step, step, 50 + step))
            if not ring.has_room:
                assert ring.num_in_flight == depth
                collected.append(ring.collect())
        while ring.num_in_flight:
            oldest = ring.oldest
            assert oldest is not None
            collected.append(ring.collect())
            assert collected[-1].batch is oldest

        assert ring.oldest is None
        assert [step.result.step for step in collected] == list(range(9))
        for step, back in enumerate(collected):
            assert back.result.tokens.tolist() == [100 + step, 150 + step]
            assert back.result.healthy.tolist() == [True, False]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("slow", ["h2d", "compute", "d2h"])
def test_worker_threads_give_the_same(depth: int, slow: str) -> None:
    queues = CpuQueues(Delays(fixed_s={slow: 0.002}))
    ring = _ring(queues, depth)
    tokens = []
    for step in range(6):
        ring.submit(_batch(step, step))
        if not ring.has_room:
            tokens += ring.collect().result.tokens.tolist()
    while ring.num_in_flight:
        tokens += ring.collect().result.tokens.tolist()
    queues.close()

    assert tokens == [100, 101, 102, 103, 104, 105]


def test_busy_time_is_that_of_the_compute_stream() -> None:
    queues = CpuQueues(Delays(fixed_s={"compute": 0.01, "h2d": 0.05, "d2h": 0.05}))
    ring = _ring(queues, 1)
    busy_s = []
    for step in range(5):
        ring.submit(_batch(step, 1))
        busy_s.append(ring.collect().result.busy_s)
    queues.close()

    # Forward and sampler are delayed by 10 ms each; the copies' 50 ms are not the compute stream's.
    assert 0.02 <= min(busy_s) < 0.05


class _GatedStep(_EchoStep):
    """A device step that does nothing until its gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        assert self.gate.wait(20)
        return super().forward(batch, layout, buffers)


def test_submit_does_not_wait_for_the_device() -> None:
    queues, step = CpuQueues(), _GatedStep()
    ring = Ring(queues=queues, depth=2, limits=_LIMITS, device_step=step)
    began_s = time.monotonic()
    ring.submit(_batch(0, 1))
    ring.submit(_batch(1, 2))

    assert time.monotonic() - began_s < 10, "the gate is closed"
    assert (ring.num_in_flight, ring.has_room) == (2, False)
    step.gate.set()
    assert [ring.collect().result.tokens.tolist() for _ in range(2)] == [[101], [102]]
    queues.close()


def test_a_step_that_samples_nothing_gives_nothing() -> None:
    builder = BatchBuilder(0)
    builder.add_chunk(BatchEntry(0, 0, 0, 0, 3, False, False, False, 0), np.array([1, 2, 3], dtype=np.int32))
    ring = _ring(SimulatorQueues(0), 2)
    ring.submit(builder.build())

    result = ring.collect().result

    assert len(result.tokens) == len(result.healthy) == 0


class _CountingQueues(SimulatorQueues):
    """Counts the bytes of copies, by stream."""

    def __init__(self) -> None:
        super().__init__(0)
        self.copied: list[tuple[str, int]] = []

    def stream(self, name: str) -> "_CountingStream":
        return _CountingStream(super().stream(name), name, self.copied)


class _CountingStream:
    def __init__(self, inner: object, name: str, copied: list[tuple[str, int]]) -> None:
        self._inner = inner
        self._name = name
        self._copied = copied

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert len(target) == len(source)
        self._copied.append((self._name, len(target)))
        self._inner.copy(target, source)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_only_the_used_part_of_the_buffers_is_copied() -> None:
    queues = _CountingQueues()
    ring = _ring(queues, 1)
    ring.submit(_batch(0, 1, 2, 3))
    ring.collect()

    (up, up_bytes), (down, down_bytes) = queues.copied
    assert (up, down) == ("h2d", "d2h")
    # Ten fields of three int32 and one of four, each rounded up to 8 bytes.
    assert up_bytes == 10 * 16
    assert down_bytes == 3 * 2 * 4
