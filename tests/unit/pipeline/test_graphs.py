"""Which steps are recorded and replayed, over closures in place of CUDA graphs (as in the simulation)."""

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gapless.config import EngineConfig
from gapless.engine.assembly import build_engine
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError
from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch, idle_decode_batch
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.graphs import GraphCounts, GraphedStep, _without_garbage_collection, decode_buckets
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling.sampler import Sampler
from simulation.harness import Rig
from simulation.recordings import ClosureRecorder
from simulation.setting import greedy, make_setting

_ROWS = 8


class SumModel:
    """Its most likely token is ``input id + position``, of a vocabulary of 32."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        token = (inputs.input_ids + inputs.positions)[inputs.logits_indices] % 32
        return torch.nn.functional.one_hot(token, 32).float()


class CuriousModel(SumModel):
    """Lets the host's lengths decide what it does."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        return super().forward(inputs)[: inputs.host_seq_lens[0] + 1]


class Driver:
    """A :class:`GraphedStep` and two sets of buffers, used in turn; the host is never ahead."""

    def __init__(self, model: SumModel) -> None:
        device = torch.device("cpu")
        queues = SimulatorQueues(0)
        step = DeviceStep(
            model=model,
            sampler=Sampler(max_rows=_ROWS, device=device),
            max_rows=_ROWS,
            max_blocks_per_row=4,
            block_size=4,
            device=device,
        )
        self.graphed = GraphedStep(step, ClosureRecorder(), decode_buckets(_ROWS))
        limits = BufferLimits(max_tokens=16, max_rows=_ROWS, max_changes=8, max_masked=8)
        self.buffers = [StepBuffers(queues, limits), StepBuffers(queues, limits)]
        self.logits: list[Tensor] = []

    def run(self, batch: ScheduledBatch) -> list[int]:
        """The tokens of the step."""
        buffers = self.buffers[len(self.logits) % 2]
        layout = buffers.write(batch)
        buffers.device_in.copy_(buffers.host_in)
        with torch.inference_mode():
            logits = self.graphed.forward(batch, layout, buffers)
            self.graphed.sample(logits, batch, layout, buffers)
        self.logits.append(logits)
        buffers.host_out.copy_(buffers.device_out)
        return buffers.read(batch, 0.0).tokens.tolist()


def batch(tokens: Sequence[int], *, start: int = 0, samples: bool = True, drawn: bool = False) -> ScheduledBatch:
    """One token for each of the first rows."""
    builder = BatchBuilder(0)
    for row, token in enumerate(tokens):
        if drawn:
            builder.random_samples.append(row)
        builder.add_token(BatchEntry(row, 0, row, start, 1, True, samples, False, 0), token)
    return builder.build(buckets=decode_buckets(_ROWS), reserved_row=_ROWS)


def test_c15_buckets_cost_little_padding() -> None:
    assert decode_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_buckets(256)[10:] == (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert decode_buckets(1) == (1,)
    assert decode_buckets(33)[-2:] == (32, 33)
    buckets = decode_buckets(1000)
    for size in range(1, 1001):
        padding = min(bucket for bucket in buckets if bucket >= size) - size
        assert padding < (8 if size <= 64 else 16 if size <= 256 else 32)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 63, 64, 65, 255, 256, 257, 300])
def test_buckets_rise_to_the_number_of_rows(max_rows: int) -> None:
    buckets = decode_buckets(max_rows)

    assert list(buckets) == sorted(set(buckets))
    assert buckets[-1] == max_rows


def test_a_bucket_is_launched_once_for_each_set_of_buffers_and_then_replayed() -> None:
    driver = Driver(SumModel())

    for index in range(6):
        assert driver.run(batch([3, 5, 7], start=index)) == [3 + index, 5 + index, 7 + index]

    assert driver.graphed.counts == GraphCounts(captured=2, replayed=4)
    assert driver.run(batch([1], start=9)) == [10]
    assert driver.graphed.counts == GraphCounts(captured=3, replayed=4)


def test_logits_of_replayed_steps_share_one_tensor() -> None:
    driver = Driver(SumModel())
    for size in (1, 1, 3, 3, 8, 8, 1, 1, 3, 3, 8, 8):
        driver.run(batch(range(size)))

    replayed = driver.logits[6:]
    assert {logits.data_ptr() for logits in replayed} == {replayed[0].data_ptr()}
    assert [len(logits) for logits in replayed] == [1, 1, 4, 4, 8, 8]


def test_a_drawn_sample_follows_a_replayed_forward() -> None:
    driver = Driver(SumModel())
    for _ in range(4):
        driver.run(batch([3, 5]))
    drawn = driver.run(batch([3, 5], drawn=True))

    assert driver.graphed.counts == GraphCounts(captured=2, replayed=3)
    launched = Driver(SumModel())
    assert drawn == launched.run(batch([3, 5], drawn=True))


@pytest.mark.parametrize("kind", ["prefill", "without a sample"])
def test_other_steps_are_launched(kind: str) -> None:
    builder = BatchBuilder(0)
    if kind == "prefill":
        builder.add_chunk(BatchEntry(0, 0, 0, 0, 2, True, True, False, 0), torch.tensor([1, 2]).int().numpy())
        step = builder.build(buckets=decode_buckets(_ROWS), reserved_row=_ROWS)
    else:
        step = batch([3, 5], samples=False)
    driver = Driver(SumModel())
    for _ in range(6):
        driver.run(step)

    assert driver.graphed.counts == GraphCounts(captured=0, replayed=0)


def test_hazard_12_what_is_recorded_is_told_no_lengths() -> None:
    driver = Driver(CuriousModel())
    driver.run(batch([1]))
    driver.run(batch([1]))

    with pytest.raises(IndexError):
        driver.run(batch([1]))


def test_an_idle_step_gives_nothing_and_is_recorded() -> None:
    driver = Driver(SumModel())

    assert driver.run(idle_decode_batch(_ROWS, _ROWS)) == []
    assert driver.graphed.counts == GraphCounts(captured=1, replayed=0)


def test_an_engine_over_recordings_replays_its_decode_steps() -> None:
    rig = Rig(make_setting(depth=2, num_blocks=40, buckets=(1, 2, 4)), SimulatorQueues(3))
    planned = [rig.setting.plan(greedy(range(1, 4 + 3 * i), 20)) for i in range(4)]
    ids = [rig.submit(each) for each in planned]
    rig.run_until_idle()

    for request_id, each in zip(ids, planned, strict=True):
        rig.check_output(each, request_id)
    assert isinstance(rig.executor, GraphedStep)
    counts = rig.executor.counts
    assert counts.captured <= 2 * 3
    assert counts.replayed > 8


class Nobody:
    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Nothing is asked for."""

    def engine_died(self, error: EngineDeadError) -> None:
        raise error


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_cpu_launches_everything_and_pads_nothing(cuda_graphs: bool) -> None:
    config = EngineConfig(device="cpu", load_format="dummy", num_blocks=8, max_model_len=64, cuda_graphs=cuda_graphs)
    built = build_engine("tiny-llama", config, Nobody())
    built.engine.shutdown()

    assert isinstance(built.executor, DeviceStep)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_within_the_block_and_the_setting_comes_back(enabled: bool) -> None:
    def fails_within() -> None:
        with _without_garbage_collection():
            assert not gc.isenabled()
            raise KeyError

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError):
            fails_within()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
