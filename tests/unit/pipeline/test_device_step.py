"""The device's side of a step on a hash model: padding touches the reserved block only, rows remember their tokens."""

import numpy as np
import torch

from gapless.pipeline.batch import BatchBuilder, BatchEntry, RowInit, ScheduledBatch, TableChange
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.padding import StepBuckets
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling.sampler import Sampler
from gapless.sampling_params import SamplingParams
from simulation.hash_model import HashModel
from simulation.solo import solo

_ROWS, _BLOCKS, _SIZE = 4, 6, 2
_CPU = torch.device("cpu")


class _Device:
    """A device step and one set of buffers; runs a batch at once."""

    def __init__(self) -> None:
        self.model = HashModel(num_blocks=_BLOCKS, block_size=_SIZE, seed=1)
        self.step = DeviceStep(
            model=self.model,
            sampler=Sampler(max_rows=_ROWS, device=_CPU),
            max_rows=_ROWS,
            max_blocks_per_row=_BLOCKS,
            block_size=_SIZE,
            device=_CPU,
        )
        self._buffers = StepBuffers(
            SimulatorQueues(0), BufferLimits(max_tokens=16, max_rows=8, max_changes=16, max_masked=8)
        )

    def run(self, batch: ScheduledBatch) -> list[int]:
        layout = self._buffers.write(batch)
        self._buffers.device_in.copy_(self._buffers.host_in)
        logits = self.step.forward(batch, layout, self._buffers)
        self.step.sample(logits, batch, layout, self._buffers)
        return self._buffers.output_view(len(batch.sample_rows))[: len(batch.sample_rows)].tolist()


def _prefill(tables: dict[int, list[int]], prompts: dict[int, list[int]]) -> ScheduledBatch:
    builder = BatchBuilder(0)
    for row, prompt in prompts.items():
        builder.table_changes += [TableChange(row, column, block) for column, block in enumerate(tables[row])]
        builder.add_chunk(
            BatchEntry(row, 0, row, 0, len(prompt), True, True, False, 0), np.array(prompt, dtype=np.int32)
        )
    return builder.build()


def _decode(rows: dict[int, int], *, buckets: tuple[int, ...] = ()) -> ScheduledBatch:
    builder = BatchBuilder(1)
    for row, start in rows.items():
        builder.add_token(BatchEntry(row, 0, row, start, 1, True, True, True, 1), 0)
    return StepBuckets(num_rows=_ROWS, decode=buckets).pad(builder.build())


_PROMPTS = {0: [3, 4, 5], 1: [6], 2: [7, 8, 9]}
# The last block of the pool belongs to a live request.
_TABLES = {0: [1, 2], 1: [3], 2: [5, _BLOCKS]}


def _solo(prompt: list[int]) -> tuple[int, ...]:
    return solo(prompt, SamplingParams(temperature=0), max_tokens=3).token_ids


def test_tokens_are_carried_by_row_and_sampled_again() -> None:
    device = _Device()
    first = device.run(_prefill(_TABLES, _PROMPTS))
    # In another order, with one row less; row 2 then comes back.
    second = device.run(_decode({1: 1, 0: 3}))
    third = device.run(_decode({2: 3}))

    alone = {row: _solo(prompt) for row, prompt in _PROMPTS.items()}
    assert first == [alone[0][0], alone[1][0], alone[2][0]]
    assert second == [alone[1][1], alone[0][1]]
    assert third == [alone[2][1]]
    assert device.step.last_tokens.tolist() == [alone[0][1], alone[1][1], alone[2][1], 0, 0]


def test_c15_padding_three_to_four_writes_the_reserved_block_and_nothing_else() -> None:
    device = _Device()
    device.run(_prefill(_TABLES, _PROMPTS))
    sentinel = -(10**15)
    written = {0: 3, 1: 1, 2: 3}
    for layer in (device.model.first, device.model.second):
        for slot in range(len(layer)):
            if slot not in _slots_of_contexts():
                layer[slot] = sentinel

    tokens = device.run(_decode(written, buckets=(4,)))

    assert tokens[:3] == [_solo(prompt)[1] for prompt in _PROMPTS.values()]
    assert len(tokens) == 4
    intended = {_TABLES[row][start // _SIZE] * _SIZE + start % _SIZE for row, start in written.items()}
    for layer in (device.model.first, device.model.second):
        touched = {slot for slot, value in enumerate(layer) if value != sentinel} - _slots_of_contexts()
        assert touched == intended | {0}
    last_block = range(_BLOCKS * _SIZE, (_BLOCKS + 1) * _SIZE)
    assert [device.model.first[slot] for slot in last_block].count(sentinel) == 0, "both its tokens are there"


def test_c15_padding_leaves_real_rows_alone() -> None:
    device = _Device()
    device.run(_prefill(_TABLES, _PROMPTS))
    before = device.step.block_tables.clone()
    last = device.step.last_tokens.clone()

    device.run(_decode({1: 1}, buckets=(4,)))

    assert torch.equal(device.step.block_tables, before)
    assert not device.step.block_tables[_ROWS].any(), "the reserved row names the reserved block"
    changed = (device.step.last_tokens != last).nonzero()[:, 0].tolist()
    assert set(changed) <= {1, _ROWS}


def test_a_row_takes_its_new_owners_sampling_state() -> None:
    device = _Device()
    params = SamplingParams(temperature=1.5, seed=77, max_tokens=2)
    builder = BatchBuilder(0)
    builder.table_changes.append(TableChange(0, 0, 1))
    builder.row_inits.append(RowInit(row=0, temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=77))
    builder.add_token(BatchEntry(0, 0, 0, 0, 1, True, True, False, 0), 9)
    builder.random_samples.append(0)

    assert tuple(device.run(builder.build())) == solo([9], params, max_tokens=1).token_ids


def _slots_of_contexts() -> set[int]:
    """Where the prompts' KV lies."""
    return {
        _TABLES[row][position // _SIZE] * _SIZE + position % _SIZE
        for row, prompt in _PROMPTS.items()
        for position in range(len(prompt))
    }
