"""The device's side of a step: change tables and rows, carry tokens over, run the model, sample.

:class:`DeviceStep` owns the state that lives on the device by row (block tables, last tokens; the sampler owns its
own). All of it is touched on the compute stream only, in enqueue order; that order is the fence that lets the host
hand rows and blocks on at once. Forward and sampler are separate calls, so that a later feature can put work between.

It launches a step's work piece by piece; :class:`~gapless.pipeline.graphs.GraphedStep` replays it where it can. The
ring knows neither, only :class:`StepExecutor`.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.layers.forward_inputs import ForwardInputs, StepBounds
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.carry_over import apply_carry_over
from gapless.pipeline.layout import StepLayout
from gapless.pipeline.logprobs import LogprobWork
from gapless.pipeline.step_buffers import StepBuffers
from gapless.pipeline.step_edges import StepEdges, TorchEdges
from gapless.pipeline.wide_rows import WideWork, wide_inits, wide_samples
from gapless.sampling.logits_hook import LogitsProcessor, SampledRows
from gapless.sampling.logprobs import DeviceLogprobs, token_logprobs
from gapless.sampling.sampler import RowParams, Sampled, SampleInputs, Sampler

__all__ = ["DeviceStep", "ForwardModel", "StepExecutor"]

# Most logits made at once to rate prompt tokens: 64 MiB of fp32, and some times that while they are rated.
_RATED_LOGITS = 1 << 24


class ForwardModel(Protocol):
    """Anything that turns inputs into logits: the models, and the simulator's hash of the KV cache."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Return ``[num_samples, vocab_size]``, fp32."""

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        """Return what :meth:`logits` reads, ``[num_tokens, ...]``; writes the same KV as ``forward``."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of some tokens' hidden states, ``[n, vocab_size]``, fp32."""


class StepExecutor(Protocol):
    """What the ring has done for a step: two calls in this order, both on the compute stream."""

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        """Apply the step's changes to device state and return its logits, ``[num_samples, vocab_size]``, fp32."""

    def sample(self, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        """Sample from what ``forward`` returned, remember the tokens by row, and write the step's output."""


class DeviceStep:
    """Device state by row, and the work of one step over it.

    Args:
        model: makes the logits.
        sampler: chooses tokens from them.
        max_rows: rows for requests; row ``max_rows`` is the reserved one.
        max_blocks_per_row: width of the block table.
        block_size: tokens in a block.
        edges: the work before and after the model; plain torch by default.
        logits_processor: a user's change of the logits.
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
        edges: StepEdges | None = None,
        logits_processor: LogitsProcessor | None = None,
    ) -> None:
        self._model = model
        self._logits_processor = logits_processor
        self._sampler = sampler
        self._block_size = block_size
        self._edges = edges or TorchEdges()
        # Zero is the reserved block: an entry nobody has set is harmless.
        self.block_tables = torch.zeros((max_rows + 1, max_blocks_per_row), dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        """Apply the step's changes to device state and return its logits. Compute stream."""
        buffers.launch = "kernels"
        self.apply_changes(batch, layout, buffers)
        query_lens: tuple[int, ...] = ()
        seq_lens: tuple[int, ...] = ()
        if batch.bounds is None:
            query_lens, seq_lens = tuple(batch.query_lens.tolist()), tuple(batch.seq_lens.tolist())
            if not batch.rates_prompts:
                return self.compute_logits(layout, buffers, query_lens=query_lens, seq_lens=seq_lens)
        hidden = self.compute_hidden(layout, buffers, query_lens=query_lens, seq_lens=seq_lens, bounds=batch.bounds)
        return self.logits_of(hidden, batch, layout, buffers)

    def sample(self, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        """Sample, remember the tokens by row, and write the step's output. Compute stream."""
        if len(batch.sample_rows):
            sampled = self.choose_tokens(
                logits,
                layout,
                buffers,
                needs_filter=batch.needs_filter,
                wide=batch.wide,
                logprobs=batch.logprobs,
                process=self._processing(batch, layout, buffers),
            )
            if sampled.logprobs is not None:
                _copy(buffers.logprob_views(batch), sampled.logprobs)
            if sampled.full_logprobs is not None:
                buffers.full_logprob_views(batch).copy_(sampled.full_logprobs)

    @property
    def has_logits_processor(self) -> bool:
        """Whether a user changes the logits, so that no step samples plainly."""
        return self._logits_processor is not None

    def _processing(
        self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers
    ) -> Callable[[Tensor], Tensor] | None:
        processor = self._logits_processor
        if processor is None:
            return None
        packed = buffers.device_in
        # Nothing has been sampled since forward, so carry-over gives the same ids once more.
        ids = apply_carry_over(layout.device(packed, "input_ids"), layout.device(packed, "carry"), self.last_tokens)
        sampling = [entry.request_id for entry in batch.entries if entry.samples]
        rows = SampledRows(
            request_ids=(*sampling, *[-1] * (len(batch.sample_rows) - len(sampling))),
            rows=layout.device(packed, "sample_rows").to(torch.int64),
            input_tokens=ids.index_select(0, layout.device(packed, "sample_tokens").to(torch.int64)),
            output_positions=layout.device(packed, "output_positions"),
        )

        def process(logits: Tensor) -> Tensor:
            changed = processor(logits, rows)
            if changed.shape != logits.shape or changed.dtype != logits.dtype:
                raise ConfigError(
                    f"the logits processor returned {tuple(changed.shape)} {changed.dtype} for "
                    f"{tuple(logits.shape)} {logits.dtype}"
                )
            return changed

        return process

    def compute_logits(
        self, layout: StepLayout, buffers: StepBuffers, *, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]
    ) -> Tensor:
        """Carry tokens over and run the model; reads the fixed part of the packed input only. Compute stream.

        Args:
            layout: where the fields lie.
            buffers: the step's.
            query_lens, seq_lens: what the host tells the model of the entries' lengths, see ``ForwardInputs``.
        """
        return self._model.forward(self._inputs(layout, buffers, query_lens, seq_lens, None))

    def compute_hidden(
        self,
        layout: StepLayout,
        buffers: StepBuffers,
        *,
        query_lens: tuple[int, ...] = (),
        seq_lens: tuple[int, ...] = (),
        bounds: StepBounds | None = None,
    ) -> Tensor:
        """As :meth:`compute_logits`, up to the head: ``[num_tokens, ...]`` for :meth:`logits_of`. Compute stream.

        With ``bounds`` and no lengths it reads no field behind the entries', so that samples may be of any number.
        """
        return self._model.hidden_states(self._inputs(layout, buffers, query_lens, seq_lens, bounds))

    def logits_of(self, hidden: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        """Rate prompt tokens if the step does; the logits of its samples. Compute stream."""
        if batch.rates_prompts:
            self._rate_prompt_tokens(hidden, batch, layout, buffers)
        indices = layout.device(buffers.device_in, "sample_tokens").to(torch.int64)
        return self._model.logits(hidden.index_select(0, indices))

    def _inputs(
        self,
        layout: StepLayout,
        buffers: StepBuffers,
        query_lens: tuple[int, ...],
        seq_lens: tuple[int, ...],
        bounds: StepBounds | None,
    ) -> ForwardInputs:
        packed = buffers.device_in

        def view(name: str) -> Tensor:
            return layout.device(packed, name)

        ready = self._edges.prepare(
            view("input_ids"),
            view("carry"),
            view("positions"),
            view("token_rows"),
            self.last_tokens,
            self.block_tables,
            self._block_size,
        )
        return ForwardInputs(
            input_ids=ready.input_ids,
            positions=ready.positions,
            slot_mapping=ready.slot_mapping,
            query_starts=view("query_starts"),
            seq_lens=view("seq_lens"),
            rows=view("rows"),
            block_tables=self.block_tables,
            logits_indices=view("sample_tokens").to(torch.int64),
            host_query_lens=query_lens,
            host_seq_lens=seq_lens,
            bounds=bounds,
        )

    def _rate_prompt_tokens(
        self, hidden: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers
    ) -> None:
        """Write the log-probs of prompt tokens, a slice at a time: each takes a row as wide as the vocabulary."""
        indices = layout.device(buffers.device_in, "prompt_rated_indices").to(torch.int64)
        tokens = layout.device(buffers.device_in, "prompt_rated_tokens").to(torch.int64)
        output = buffers.prompt_logprob_views(batch)
        slice_size = max(1, _RATED_LOGITS // self._model.vocab_size)
        for start in range(0, len(indices), slice_size):
            part = slice(start, start + slice_size)
            logits = self._model.logits(hidden.index_select(0, indices[part]))
            rated = token_logprobs(logits, tokens[part], output.top.shape[1])
            _copy(
                DeviceLogprobs(
                    chosen=output.chosen[part],
                    ranks=output.ranks[part],
                    top_ids=output.top_ids[part],
                    top=output.top[part],
                ),
                rated,
            )

    def choose_tokens(
        self,
        logits: Tensor,
        layout: StepLayout,
        buffers: StepBuffers,
        *,
        needs_filter: bool,
        wide: WideWork | None = None,
        logprobs: LogprobWork | None = None,
        process: Callable[[Tensor], Tensor] | None = None,
    ) -> Sampled:
        """Sample a token for each row of ``logits`` and keep it. Compute stream.

        Args:
            logits: ``[num_samples, vocab_size]``, fp32; may be overwritten.
            layout: where the fields lie.
            buffers: the step's.
            needs_filter, wide, logprobs: as in the batch.
            process: changes the logits first of all.
        """
        packed = buffers.device_in
        rows = layout.device(packed, "sample_rows").to(torch.int64)
        rates = logprobs is not None and bool(logprobs.samples)
        full = logprobs is not None and bool(logprobs.full_samples)
        sampled = self._sampler.sample(
            logits,
            SampleInputs(
                rows=rows,
                output_positions=layout.device(packed, "output_positions"),
                random_samples=layout.device(packed, "random_samples").to(torch.int64),
                masked_samples=layout.device(packed, "masked_samples").to(torch.int64),
                masked_tokens=layout.device(packed, "masked_tokens").to(torch.int64),
                needs_filter=needs_filter,
                wide=None if wide is None else wide_samples(wide, lambda name: layout.device(packed, name)),
                rated=layout.device(packed, "rated_samples").to(torch.int64) if rates else None,
                num_top=0 if logprobs is None else logprobs.num_top,
                process=process,
                full=layout.device(packed, "full_samples").to(torch.int64) if full else None,
            ),
        )
        sample_rows = layout.device(packed, "sample_rows")
        self._edges.keep(sampled.tokens, sampled.top, sample_rows, self.last_tokens, buffers.output_view(len(logits)))
        return sampled

    def apply_changes(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        """Change block tables and rows as the tail of the packed input says. Compute stream."""

        def view(name: str) -> Tensor:
            return layout.device(buffers.device_in, name)

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
        if batch.wide is not None and batch.wide.has_inits:
            self._sampler.set_wide_rows(wide_inits(batch.wide, view))


def _copy(target: DeviceLogprobs, source: DeviceLogprobs) -> None:
    target.chosen.copy_(source.chosen)
    target.ranks.copy_(source.ranks)
    target.top_ids.copy_(source.top_ids)
    target.top.copy_(source.top)
