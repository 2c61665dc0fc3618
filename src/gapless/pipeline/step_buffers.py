"""The storage of one step in flight: :class:`StepBuffers`, packed pinned host input, device input and output.

Life cycle (invariant: written only before the copy is enqueued, written again only after ``d2h_done``)::

    host writes `host_in` -> h2d copies it -> compute reads `device_in`, writes `device_out` -> d2h copies it
    -> host waits for `d2h_done`, copies `host_out` out -> the buffers are free again

Outputs live here and not in the graphs' memory pool, since the d2h copy of step N overlaps the compute of N+1.
Owned by the ring; the host side is touched by the engine thread only.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gapless.pipeline.batch import ScheduledBatch, StepResult
from gapless.pipeline.layout import StepLayout, capacity_bytes, layout_of, sizes_of
from gapless.pipeline.streams.protocol import Queues

__all__ = ["BufferLimits", "StepBuffers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """The largest step: its tokens, its entries (padding included) and its tail."""

    max_tokens: int
    max_rows: int
    max_changes: int
    max_masked: int


class StepBuffers:
    """One set of buffers and the events that order their use."""

    def __init__(self, queues: Queues, limits: BufferLimits) -> None:
        size = capacity_bytes(
            max_tokens=limits.max_tokens,
            max_rows=limits.max_rows,
            max_changes=limits.max_changes,
            max_masked=limits.max_masked,
        )
        self.host_in = queues.host_buffer(size)
        self.device_in = torch.zeros(size, dtype=torch.uint8, device=queues.device)
        # Rows of the output: tokens, then 1 where the logits were finite.
        self.device_out = torch.zeros(2 * limits.max_rows * 4, dtype=torch.uint8, device=queues.device)
        self.host_out = queues.host_buffer(2 * limits.max_rows * 4)
        self.h2d_done = queues.event()
        self.compute_start = queues.event()
        self.compute_done = queues.event()
        self.d2h_done = queues.event()
        self._host_array = self.host_in.numpy()
        self._out_array = self.host_out.numpy()

    def write(self, batch: ScheduledBatch) -> StepLayout:
        """Pack ``batch`` into the host input; returns where its fields lie."""
        layout = layout_of(sizes_of(batch))
        assert layout.num_bytes <= len(self._host_array), "the step is larger than its buffers"
        host = self._host_array

        def put(name: str, values: ArrayLike) -> None:
            layout.host(host, name)[:] = values

        put("input_ids", batch.input_ids)
        put("positions", batch.positions)
        put("carry", batch.carry)
        put("token_rows", batch.token_rows)
        starts = layout.host(host, "query_starts")
        starts[:1] = 0
        np.cumsum(batch.query_lens, out=starts[1:])
        put("seq_lens", batch.seq_lens)
        put("rows", batch.rows)
        put("sample_tokens", batch.sample_tokens)
        put("sample_rows", batch.sample_rows)
        put("output_positions", batch.output_positions)
        if len(batch.random_samples):
            put("random_samples", batch.random_samples)
        if batch.table_changes:
            for name, column in zip(("rows", "columns", "blocks"), zip(*batch.table_changes, strict=True), strict=True):
                put(f"change_{name}", column)
        if batch.row_inits:
            put("init_rows", [init.row for init in batch.row_inits])
            put("init_top_k", [init.top_k for init in batch.row_inits])
            put("init_temperature", [init.temperature for init in batch.row_inits])
            put("init_top_p", [init.top_p for init in batch.row_inits])
            put("init_min_p", [init.min_p for init in batch.row_inits])
            put("init_seed", [init.seed for init in batch.row_inits])
        if batch.masked_tokens:
            put("masked_samples", [masked.sample for masked in batch.masked_tokens])
            put("masked_tokens", [masked.token for masked in batch.masked_tokens])
        return layout

    def output_views(self, num_samples: int) -> "OutputViews":
        """The device output of a step with ``num_samples`` samples."""
        flat = self.device_out[: 2 * num_samples * 4].view(torch.int32)
        return OutputViews(tokens=flat[:num_samples], healthy=flat[num_samples:])

    def read(self, batch: ScheduledBatch, busy_s: float) -> StepResult:
        """Copy the results out; only after ``d2h_done``."""
        padded = len(batch.sample_rows)
        flat = self._out_array[: 2 * padded * 4].view(np.int32)
        real = sum(entry.samples for entry in batch.entries) if padded > len(batch.entries) else padded
        return StepResult(
            step=batch.step,
            tokens=flat[:real].copy(),
            healthy=flat[padded : padded + real] != 0,
            busy_s=busy_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputViews:
    """``tokens`` and ``healthy``: ``[num_samples]``, int32, device."""

    tokens: Tensor
    healthy: Tensor
