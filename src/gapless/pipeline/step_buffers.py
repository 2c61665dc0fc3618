"""The storage of one step in flight: :class:`StepBuffers`, packed pinned host input, device input and output.

Life cycle (invariant: written only before the copy is enqueued, written again only after ``d2h_done``)::

    host writes `host_in` -> h2d copies it -> compute reads `device_in`, writes `device_out` -> d2h copies it
    -> host waits for `d2h_done`, copies `host_out` out -> the buffers are free again

Outputs live here and not in the graphs' memory pool, since the d2h copy of step N overlaps the compute of N+1.
Owned by the ring; the host side is touched by the engine thread only.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gapless.pipeline.batch import ScheduledBatch, StepResult
from gapless.pipeline.layout import StepLayout, capacity_bytes, layout_of, sizes_of
from gapless.pipeline.logprobs import LogprobLimits, block_bytes, device_block, host_block
from gapless.pipeline.streams.protocol import Queues
from gapless.pipeline.wide_rows import WideLimits, write_wide
from gapless.sampling.logprobs import DeviceLogprobs
from gapless.timeline.spans import Launch

__all__ = ["BufferLimits", "StepBuffers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferLimits:
    """The largest step: its tokens, its entries (padding included) and its tail."""

    max_tokens: int
    max_rows: int
    max_changes: int
    max_masked: int
    wide: WideLimits = field(default_factory=WideLimits)
    logprobs: LogprobLimits = field(default_factory=LogprobLimits)


class StepBuffers:
    """One set of buffers and the events that order their use."""

    def __init__(self, queues: Queues, limits: BufferLimits) -> None:
        size = capacity_bytes(
            max_tokens=limits.max_tokens,
            max_rows=limits.max_rows,
            max_changes=limits.max_changes,
            max_masked=limits.max_masked,
            max_prompt_rated=limits.logprobs.max_prompt_tokens,
            wide=limits.wide,
        )
        self.host_in = queues.host_buffer(size)
        self.device_in = torch.zeros(size, dtype=torch.uint8, device=queues.device)
        # The output: tokens, then 1 where the logits were finite, then log-probs of samples and of prompt tokens, then
        # rows of the whole vocabulary's.
        max_rated = limits.max_rows + limits.logprobs.max_prompt_tokens
        out_size = 2 * limits.max_rows * 4 + block_bytes(max_rated, limits.logprobs.max_top)
        out_size += limits.logprobs.full_bytes
        self._vocab_size = limits.logprobs.vocab_size
        self.device_out = torch.zeros(out_size, dtype=torch.uint8, device=queues.device)
        self.host_out = queues.host_buffer(out_size)
        # Two events that only a timeline records; it also takes the first in exchange for another one.
        self.h2d_start = queues.event()
        self.d2h_start = queues.event()
        self.h2d_done = queues.event()
        self.compute_start = queues.event()
        self.compute_done = queues.event()
        self.d2h_done = queues.event()
        # How the step in these buffers was enqueued, noted by whoever does it.
        self.launch: Launch = "kernels"
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
        if batch.wide is not None:
            write_wide(put, batch.wide)
        if batch.logprobs is not None:
            put("rated_samples", batch.logprobs.samples)
            put("full_samples", batch.logprobs.full_samples)
            put("prompt_rated_indices", batch.logprobs.prompt_indices)
            put("prompt_rated_tokens", batch.logprobs.prompt_tokens)
        return layout

    def output_view(self, num_samples: int) -> Tensor:
        """The device output of a step, ``[2 * num_samples]``, int32: the tokens, then whether each one is healthy."""
        return self.device_out[: 2 * num_samples * 4].view(torch.int32)

    def output_bytes(self, batch: ScheduledBatch) -> int:
        """How much of the output a step uses."""
        used = 2 * 4 * len(batch.sample_rows)
        if batch.logprobs is not None:
            used += batch.logprobs.num_bytes + 4 * len(batch.logprobs.full_samples) * self._vocab_size
        return used

    def full_logprob_views(self, batch: ScheduledBatch) -> Tensor:
        """Where rows of the whole vocabulary's log-probs go, ``[num_full_samples, vocab_size]``, fp32."""
        assert batch.logprobs is not None
        start = 2 * 4 * len(batch.sample_rows) + batch.logprobs.num_bytes
        flat = self.device_out[start : self.output_bytes(batch)].view(torch.float32)
        return flat.view(-1, self._vocab_size)

    def logprob_views(self, batch: ScheduledBatch) -> DeviceLogprobs:
        """Where the log-probs of a step's samples go."""
        assert batch.logprobs is not None
        return device_block(
            self.device_out, 2 * 4 * len(batch.sample_rows), len(batch.logprobs.samples), batch.logprobs.num_top
        )

    def prompt_logprob_views(self, batch: ScheduledBatch) -> DeviceLogprobs:
        """Where the log-probs of a step's prompt tokens go."""
        work = batch.logprobs
        assert work is not None
        offset = 2 * 4 * len(batch.sample_rows) + block_bytes(len(work.samples), work.num_top)
        return device_block(self.device_out, offset, len(work.prompt_tokens), work.num_prompt_top)

    def read(self, batch: ScheduledBatch, busy_s: float) -> StepResult:
        """Copy the results out; only after ``d2h_done``."""
        padded = len(batch.sample_rows)
        flat = self._out_array[: 2 * padded * 4].view(np.int32)
        real = sum(entry.samples for entry in batch.entries) if padded > len(batch.entries) else padded
        logprobs = prompt_logprobs = full_logprobs = None
        if (work := batch.logprobs) is not None:
            offset = 2 * 4 * padded
            logprobs = host_block(self._out_array, offset, len(work.samples), work.num_top)
            offset += block_bytes(len(work.samples), work.num_top)
            prompt_logprobs = host_block(self._out_array, offset, len(work.prompt_tokens), work.num_prompt_top)
            if work.full_samples:
                start = 2 * 4 * padded + work.num_bytes
                rows = self._out_array[start : self.output_bytes(batch)].view(np.float32)
                full_logprobs = rows.reshape(-1, self._vocab_size).copy()
        return StepResult(
            step=batch.step,
            tokens=flat[:real].copy(),
            healthy=flat[padded : padded + real] != 0,
            busy_s=busy_s,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            full_logprobs=full_logprobs,
        )
