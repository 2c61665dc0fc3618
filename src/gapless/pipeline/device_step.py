"""The device's side of a step: change tables and rows, carry tokens over, run the model, sample.

:class:`DeviceStep` owns the state that lives on the device by row (block tables, last tokens; the sampler owns its
own). All of it is touched on the compute stream only, in enqueue order; that order is the fence that lets the host
hand rows and blocks on at once. Forward and sampler are separate calls, so that a later feature can put work between.
"""

from typing import Protocol

import torch
from torch import Tensor

from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.carry_over import apply_carry_over
from gapless.pipeline.layout import StepLayout
from gapless.pipeline.step_buffers import StepBuffers
from gapless.sampling.sampler import RowParams, SampleInputs, Sampler

__all__ = ["DeviceStep", "ForwardModel"]


class ForwardModel(Protocol):
    """Anything that turns inputs into logits: the models, and the simulator's hash of the KV cache."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return ``[num_samples, vocab_size]``, fp32."""


class DeviceStep:
    """Device state by row, and the work of one step over it.

    Args:
        model: makes the logits.
        sampler: chooses tokens from them.
        max_rows: rows for requests; row ``max_rows`` is the reserved one.
        max_blocks_per_row: width of the block table.
        block_size: tokens in a block.
    """

    def __init__(
        self,
        *,
        model: ForwardModel,
        sampler: Sampler,
        max_rows: int,
        max_blocks_per_row: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._block_size = block_size
        # Zero is the reserved block: an entry nobody has set is harmless.
        self.block_tables = torch.zeros((max_rows + 1, max_blocks_per_row), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        """Apply the step's changes to device state and return its logits. Compute stream."""
        packed = buffers.device_in

        def view(name: str) -> Tensor:
            return layout.device(packed, name)

        self._apply_changes(batch, layout, packed)
        input_ids = apply_carry_over(view("input_ids"), view("carry"), self.last_tokens)
        positions = view("positions").to(torch.int64)
        blocks = self.block_tables[view("token_rows"), positions // self._block_size]
        inputs = ForwardInputs(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=blocks.to(torch.int64) * self._block_size + positions % self._block_size,
            query_starts=view("query_starts"),
            seq_lens=view("seq_lens"),
            rows=view("rows"),
            block_tables=self.block_tables,
            logits_indices=view("sample_tokens").to(torch.int64),
            host_query_lens=tuple(batch.query_lens.tolist()),
            host_seq_lens=tuple(batch.seq_lens.tolist()),
        )
        return self._model.forward(inputs)

    def sample(self, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        """Sample, remember the tokens by row, and write the step's output. Compute stream."""
        num_samples = len(batch.sample_rows)
        if num_samples == 0:
            return
        packed = buffers.device_in
        rows = layout.device(packed, "sample_rows").to(torch.int64)
        sampled = self._sampler.sample(
            logits,
            SampleInputs(
                rows=rows,
                output_positions=layout.device(packed, "output_positions"),
                random_samples=layout.device(packed, "random_samples").to(torch.int64),
                masked_samples=layout.device(packed, "masked_samples").to(torch.int64),
                masked_tokens=layout.device(packed, "masked_tokens").to(torch.int64),
                needs_filter=batch.needs_filter,
            ),
        )
        self.last_tokens.index_copy_(0, rows, sampled.tokens)
        output = buffers.output_views(num_samples)
        output.tokens.copy_(sampled.tokens)
        output.healthy.copy_(sampled.healthy)

    def _apply_changes(self, batch: ScheduledBatch, layout: StepLayout, packed: Tensor) -> None:
        def view(name: str) -> Tensor:
            return layout.device(packed, name)

        if batch.table_changes:
            rows, columns = view("change_rows").to(torch.int64), view("change_columns").to(torch.int64)
            self.block_tables.index_put_((rows, columns), view("change_blocks"))
        if batch.row_inits:
            self._sampler.set_rows(
                RowParams(
                    rows=view("init_rows").to(torch.int64),
                    temperature=view("init_temperature"),
                    top_k=view("init_top_k"),
                    top_p=view("init_top_p"),
                    min_p=view("init_min_p"),
                    seed=view("init_seed"),
                )
            )
