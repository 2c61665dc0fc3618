"""The packed step: every field survives the way from the host to the device, and only what is used is copied."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.pipeline.batch import BatchBuilder, BatchEntry, MaskedToken, RowInit, ScheduledBatch, TableChange
from gapless.pipeline.layout import StepSizes, layout_of, sizes_of
from gapless.pipeline.padding import StepBuckets
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.simulator import SimulatorQueues

_LIMITS = BufferLimits(max_tokens=64, max_rows=8, max_changes=40, max_masked=20)


@st.composite
def _batches(draw: st.DrawFn) -> ScheduledBatch:
    builder = BatchBuilder(draw(st.integers(0, 9)))
    for row in range(draw(st.integers(1, 8))):
        num_tokens, samples = draw(st.integers(1, 6)), draw(st.booleans())
        entry = BatchEntry(row, 0, row, draw(st.integers(0, 99)), num_tokens, samples, samples, samples, row)
        if samples and draw(st.booleans()):
            builder.random_samples.append(builder.num_samples)
        builder.add_chunk(entry, np.arange(num_tokens, dtype=np.int32) + 1000 * row)
    for column in range(draw(st.integers(0, 40))):
        builder.table_changes.append(TableChange(column % 8, column, 2**31 - 1 - column))
    for row in range(draw(st.integers(0, 8))):
        seed = draw(st.integers(-(2**63), 2**63 - 1))
        builder.row_inits.append(RowInit(row=row, temperature=0.7, top_k=5, top_p=0.25, min_p=0.125, seed=seed))
    builder.masked_tokens += [MaskedToken(i, 3 * i) for i in range(draw(st.integers(0, 20)))]
    buckets = StepBuckets(
        num_rows=8, decode=draw(st.sampled_from([(), (8,)])), mixed=draw(st.sampled_from([(), (48,)]))
    )
    return buckets.pad(builder.build())


def _expected(batch: ScheduledBatch) -> dict[str, list[float]]:
    names = ("input_ids", "positions", "carry", "token_rows", "seq_lens", "rows", "sample_tokens", "sample_rows")
    expected = {name: getattr(batch, name).tolist() for name in names}
    expected["query_starts"] = [0, *np.cumsum(batch.query_lens).tolist()]
    expected["output_positions"] = batch.output_positions.tolist()
    expected["random_samples"] = batch.random_samples.tolist()
    for name in ("row", "column", "block"):
        expected[f"change_{name}s"] = [getattr(change, name) for change in batch.table_changes]
    expected["init_rows"] = [init.row for init in batch.row_inits]
    for name in ("top_k", "top_p", "min_p", "seed"):
        expected[f"init_{name}"] = [getattr(init, name) for init in batch.row_inits]
    expected["init_temperature"] = [float(np.float32(init.temperature)) for init in batch.row_inits]
    expected["masked_samples"] = [masked.sample for masked in batch.masked_tokens]
    expected["masked_tokens"] = [masked.token for masked in batch.masked_tokens]
    return expected


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(_batches(), min_size=1, max_size=3))
def test_every_field_arrives(batches: list[ScheduledBatch]) -> None:
    buffers = StepBuffers(SimulatorQueues(0), _LIMITS)
    for batch in batches:
        layout = buffers.write(batch)
        used = layout.num_bytes
        buffers.device_in[:used] = buffers.host_in[:used]

        expected = _expected(batch)
        for name, field in layout.fields.items():
            if name in expected:
                assert layout.device(buffers.device_in, name).tolist() == expected.pop(name), name
            else:
                assert field.length == 0, f"{name} has values that this test does not know"
        assert not expected, "these fields have no place"


def test_fields_are_aligned_and_do_not_overlap() -> None:
    layout = layout_of(StepSizes(tokens=5, entries=3, samples=2, random=1, changes=7, inits=3, masked=1))
    end = 0
    for field in layout.fields.values():
        assert field.offset % 8 == 0
        assert field.offset >= end
        end = field.offset + field.length * field.device.itemsize
    assert end <= layout.num_bytes


def test_the_fixed_part_of_a_bucket_never_moves() -> None:
    decode = StepSizes(tokens=4, entries=4, samples=4, random=0, changes=0, inits=0, masked=0)
    plain, with_tail = layout_of(decode), layout_of(decode._replace(changes=9, inits=2, masked=5))
    for name, field in plain.fields.items():
        if field.length:
            assert with_tail.fields[name] == field


def test_a_small_step_uses_little_of_a_large_buffer() -> None:
    builder = BatchBuilder(0)
    builder.add_token(BatchEntry(0, 0, 0, 5, 1, True, True, True, 0), 0)

    used = layout_of(sizes_of(builder.build())).num_bytes
    large = BufferLimits(max_tokens=2048, max_rows=256, max_changes=4096, max_masked=256)

    assert used < 120
    assert len(StepBuffers(SimulatorQueues(0), large).host_in) > 100 * used


def test_a_step_larger_than_its_buffers_is_refused() -> None:
    buffers = StepBuffers(SimulatorQueues(0), BufferLimits(max_tokens=2, max_rows=1, max_changes=0, max_masked=0))
    builder = BatchBuilder(0)
    builder.add_chunk(BatchEntry(0, 0, 0, 0, 60, True, True, False, 0), np.zeros(60, dtype=np.int32))

    with pytest.raises(AssertionError, match="larger than its buffers"):
        buffers.write(builder.build())


def test_results_are_copies_without_padding() -> None:
    buffers = StepBuffers(SimulatorQueues(0), _LIMITS)
    builder = BatchBuilder(3)
    for row in range(3):
        builder.add_token(BatchEntry(row, 0, row, 5, 1, True, True, True, 0), 0)
    batch = StepBuckets(num_rows=8, decode=(8,)).pad(builder.build())
    output = buffers.output_view(8)
    output[:8].copy_(torch.arange(10, 18))
    output[8:].copy_(torch.tensor([1, 0, 1, 0, 0, 0, 0, 0]))
    buffers.host_out.copy_(buffers.device_out)

    result = buffers.read(batch, 0.5)
    buffers.host_out.zero_()

    assert (result.step, result.busy_s) == (3, 0.5)
    assert result.tokens.tolist() == [10, 11, 12]
    assert result.healthy.tolist() == [True, False, True]
