"""Which steps are recorded and replayed, over closures in place of CUDA graphs (as in the simulation)."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless.config import EngineConfig
from gapless.engine.assembly import build_engine
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError
from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.graphs import GraphCounts, GraphedStep
from gapless.pipeline.logprobs import LogprobLimits, PromptSpan
from gapless.pipeline.padding import StepBuckets, decode_buckets, idle_decode_batch, idle_mixed_batch
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling.sampler import Sampler
from simulation.harness import Rig
from simulation.recordings import ClosureRecorder
from simulation.setting import greedy, make_setting

_ROWS = 8
_BUCKETS = StepBuckets(num_rows=_ROWS, decode=decode_buckets(_ROWS), mixed=(4, 16))


class SumModel:
    """Its most likely token is ``input id + position``, of a vocabulary of 32."""

    vocab_size = 32

    def forward(self, inputs: ForwardInputs) -> Tensor:
        return self.logits(self.hidden_states(inputs)[inputs.logits_indices])

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        return (inputs.input_ids + inputs.positions) % 32

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden, 32).float()


class CuriousModel(SumModel):
    """Lets the host's lengths decide what it does."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        return super().forward(inputs)[: inputs.host_seq_lens[0] + 1]

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        return super().hidden_states(inputs) + 0 * inputs.host_query_lens[0]


class Driver:
    """A :class:`GraphedStep` and two sets of buffers, used in turn; the host is never ahead."""

    def __init__(self, model: SumModel) -> None:
        device = torch.device("cpu")
        queues = SimulatorQueues(0)
        step = DeviceStep(
            model=model,
            sampler=Sampler(max_rows=_ROWS, device=device),
            max_rows=_ROWS,
            max_blocks_per_row=8,
            block_size=4,
            device=device,
        )
        self.graphed = GraphedStep(step, ClosureRecorder(), _BUCKETS)
        logprobs = LogprobLimits(max_top=2, max_prompt_tokens=8)
        limits = BufferLimits(max_tokens=20, max_rows=_ROWS, max_changes=8, max_masked=8, logprobs=logprobs)
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
        self.result = buffers.read(batch, 0.0)
        return self.result.tokens.tolist()


def batch(tokens: Sequence[int], *, start: int = 0, samples: bool = True, drawn: bool = False) -> ScheduledBatch:
    """One token for each of the first rows."""
    builder = BatchBuilder(0)
    for row, token in enumerate(tokens):
        if drawn:
            builder.random_samples.append(row)
        builder.add_token(BatchEntry(row, 0, row, start, 1, True, samples, False, 0), token)
    return _BUCKETS.pad(builder.build())


def mixed(
    prompt: Sequence[int], *tokens: int, start: int = 0, padded: bool = True, samples: bool = True, rated: bool = False
) -> ScheduledBatch:
    """A prompt, or a part of one, beside one token for each of some rows."""
    builder = BatchBuilder(0)
    for row, token in enumerate(tokens, 1):
        builder.add_token(BatchEntry(row, 0, row, 5, 1, True, True, False, 0), token)
    ids = np.array(prompt, dtype=np.int32)
    if rated:
        builder.logprobs.add_prompt(PromptSpan(0, start + 1, len(ids) - 1), ids[1:], len(tokens), 2)
    builder.add_chunk(BatchEntry(0, 0, 0, start, len(ids), samples, samples, False, 0), ids)
    return _BUCKETS.pad(builder.build()) if padded else builder.build()


def test_a_bucket_is_launched_once_for_each_set_of_buffers_and_then_replayed() -> None:
    driver = Driver(SumModel())

    for index in range(6):
        assert driver.run(batch([3, 5, 7], start=index)) == [3 + index, 5 + index, 7 + index]

    assert driver.graphed.counts == GraphCounts(captured=2, captured_mixed=0, replayed=4)
    assert driver.run(batch([1], start=9)) == [10]
    assert driver.graphed.counts == GraphCounts(captured=3, captured_mixed=0, replayed=4)


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

    assert driver.graphed.counts == GraphCounts(captured=2, captured_mixed=0, replayed=3)
    launched = Driver(SumModel())
    assert drawn == launched.run(batch([3, 5], drawn=True))


def test_mixed_steps_of_any_make_up_share_their_sizes_graph() -> None:
    driver = Driver(SumModel())
    steps = [
        (mixed([1, 2, 3], 9), [9 + 5, 3 + 2]),
        (mixed([4, 4], 8, 7), [8 + 5, 7 + 5, 4 + 1]),
        (mixed([5, 6, 7, 8]), [8 + 3]),
        (mixed([2, 3, 4], samples=False), []),
        (mixed([2, 3], 6, samples=False), [6 + 5]),
    ]
    for batch, expected in steps * 2:
        assert len(batch.input_ids) == 4
        assert driver.run(batch) == expected

    assert driver.graphed.counts == GraphCounts(captured=2, captured_mixed=2, replayed=8)
    assert driver.run(mixed(range(10), 1, 2)) == [1 + 5, 2 + 5, 9 + 9]
    assert driver.graphed.counts == GraphCounts(captured=3, captured_mixed=3, replayed=8)


def test_a_replayed_mixed_step_draws_and_rates_as_a_launched_one() -> None:
    outputs = []
    for padded in (True, False):
        driver = Driver(SumModel())
        for _ in range(4):
            driver.run(mixed([3, 5, 1], 4, padded=padded))
        tokens = driver.run(mixed([3, 5, 1], 4, padded=padded, rated=True))
        rated = driver.result.prompt_logprobs
        assert rated is not None
        outputs.append((tokens, rated.chosen.tolist(), rated.top_ids.tolist()))
        assert driver.graphed.counts.replayed == (3 if padded else 0)

    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("num_tokens", [3, 17])
def test_other_steps_are_launched(num_tokens: int) -> None:
    step = mixed(range(num_tokens), padded=num_tokens > 16)
    driver = Driver(SumModel())
    for _ in range(6):
        driver.run(step)

    assert driver.graphed.counts == GraphCounts(captured=0, captured_mixed=0, replayed=0)


def test_hazard_12_what_is_recorded_is_told_no_lengths() -> None:
    driver = Driver(CuriousModel())
    driver.run(batch([1]))
    driver.run(batch([1]))

    with pytest.raises(IndexError):
        driver.run(batch([1]))


def test_hazard_12_a_mixed_step_is_told_of_no_entry() -> None:
    driver = Driver(CuriousModel())
    assert driver.run(mixed([1, 2, 3], padded=False)) == [3 + 2]

    with pytest.raises(IndexError):
        driver.run(mixed([1, 2, 3]))


def test_an_idle_step_gives_nothing_and_is_recorded() -> None:
    driver = Driver(SumModel())

    assert driver.run(idle_decode_batch(_ROWS, _ROWS)) == []
    assert driver.run(idle_mixed_batch(16, _ROWS)) == []
    assert driver.graphed.counts == GraphCounts(captured=2, captured_mixed=1, replayed=0)


def test_an_engine_over_recordings_replays_its_steps() -> None:
    setting = make_setting(depth=2, num_blocks=40, buckets=(1, 2, 4), mixed_buckets=(16,))
    rig = Rig(setting, SimulatorQueues(3))
    planned = [rig.setting.plan(greedy(range(1, 4 + 3 * i), 20)) for i in range(4)]
    ids = [rig.submit(each) for each in planned]
    rig.run_until_idle()

    for request_id, each in zip(ids, planned, strict=True):
        rig.check_output(each, request_id)
    assert isinstance(rig.executor, GraphedStep)
    counts = rig.executor.counts
    assert counts.captured - counts.captured_mixed <= 2 * 3
    assert counts.captured_mixed == 2
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
