"""What one step will run and what it gave: :class:`ScheduledBatch` and :class:`StepResult`.

The scheduler adds entries to a :class:`BatchBuilder` while it decides; ``build`` turns them into flat arrays. A batch
is immutable from then on, and a result holds copies: the ring, the device and the engine share no mutable state.
Engine thread only.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gapless.layers.forward_inputs import StepBounds
from gapless.pipeline.logprobs import HostLogprobs, LogprobBuilder, LogprobWork
from gapless.pipeline.wide_rows import WideBuilder, WideWork

__all__ = [
    "BatchBuilder",
    "BatchEntry",
    "Int32Array",
    "MaskedToken",
    "RowInit",
    "ScheduledBatch",
    "StepResult",
    "TableChange",
]

Int32Array: TypeAlias = NDArray[np.int32]


class BatchEntry(NamedTuple):
    """One request's part in a step.

    Attributes:
        request_id: whose result this is, whoever owns the row when it arrives.
        residency: which stay of the request on a row this is.
        row: its place in device state.
        start: position of its first new token.
        num_tokens: how many new tokens.
        final: the step reaches the end of what the request has so far.
        samples: the step samples a token for it.
        carries: its last input token is still on the device.
        output_position: index of the sampled token in the output.
    """

    request_id: int
    residency: int
    row: int
    start: int
    num_tokens: int
    final: bool
    samples: bool
    carries: bool
    output_position: int


class TableChange(NamedTuple):
    """``block_tables[row, column] = block`` from this step on."""

    row: int
    column: int
    block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowInit:
    """Sampling state that a request brings to its row."""

    row: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


class MaskedToken(NamedTuple):
    """A token that sample ``sample`` of this step may not become (EOS before ``min_tokens``)."""

    sample: int
    token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledBatch:
    """One step's input. Arrays are int32; the flat token axis has no padding between entries.

    What pads the step to a bucket (``gapless.pipeline.padding``) follows the real tokens and entries; it is on the
    reserved row and not in ``entries``.

    Attributes:
        input_ids, positions, carry, token_rows: ``[num_tokens]``; ``carry`` is the row whose last token is added to
            the input id there, or -1.
        query_lens, seq_lens, rows: ``[num_entries]``.
        sample_tokens, sample_rows, output_positions: ``[num_samples]``.
        random_samples: ``[n]``: which samples are drawn and not greedy.
        needs_filter: whether a drawn sample uses top_k, top_p or min_p.
        wide: penalties, biases and bad words; ``None`` where no sample uses any and no such request enters.
        logprobs: which tokens are rated; ``None`` for none.
        bounds: of a step that was padded as a mixed one: what the model is told in place of the entries' lengths.
    """

    step: int
    entries: tuple[BatchEntry, ...]
    input_ids: Int32Array
    positions: Int32Array
    carry: Int32Array
    token_rows: Int32Array
    query_lens: Int32Array
    seq_lens: Int32Array
    rows: Int32Array
    sample_tokens: Int32Array
    sample_rows: Int32Array
    output_positions: Int32Array
    random_samples: Int32Array
    needs_filter: bool
    table_changes: tuple[TableChange, ...]
    row_inits: tuple[RowInit, ...]
    masked_tokens: tuple[MaskedToken, ...]
    wide: WideWork | None = None
    logprobs: LogprobWork | None = None
    bounds: StepBounds | None = None

    @property
    def rates_prompts(self) -> bool:
        """Whether log-probs of prompt tokens are asked for."""
        return self.logprobs is not None and bool(self.logprobs.prompt_spans)

    @property
    def samples_plainly(self) -> bool:
        """Whether the largest logit decides, untouched, and nothing else is asked for: what a sampling graph does."""
        return not (len(self.random_samples) or self.masked_tokens or self.wide or self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a collected step gave.

    Attributes:
        tokens: ``[num_samples]``, in the order of the batch's sampling entries.
        healthy: ``[num_samples]``: false where the logits were not finite and the token means nothing.
        busy_s: device time of the step, in seconds.
        logprobs: of the samples that asked, in the order of the batch's ``logprobs.samples``.
        prompt_logprobs: of the prompt tokens that asked, in the order of the batch's ``logprobs.prompt_spans``.
        full_logprobs: ``[num_full_samples, vocab_size]``, in the order of the batch's ``logprobs.full_samples``.
    """

    step: int
    tokens: Int32Array
    healthy: NDArray[np.bool_]
    busy_s: float
    logprobs: HostLogprobs | None = None
    prompt_logprobs: HostLogprobs | None = None
    full_logprobs: NDArray[np.float32] | None = None


class BatchBuilder:
    """Collects a step's entries: single-token ones first, as the scheduler plans decodes before prefills."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.entries: list[BatchEntry] = []
        self.table_changes: list[TableChange] = []
        self.row_inits: list[RowInit] = []
        self.masked_tokens: list[MaskedToken] = []
        self.random_samples: list[int] = []
        self.needs_filter = False
        self.num_samples = 0
        self.wide = WideBuilder()
        self.logprobs = LogprobBuilder()
        self._ids: list[int] = []
        self._id_chunks: list[Int32Array] = []

    def add_token(self, entry: BatchEntry, token: int) -> None:
        """Add an entry of one token."""
        self.entries.append(entry)
        self.num_samples += entry.samples
        if self._id_chunks:
            self._id_chunks.append(np.array([token], dtype=np.int32))
        else:
            self._ids.append(token)

    def add_chunk(self, entry: BatchEntry, ids: Int32Array) -> None:
        """Add an entry of several tokens."""
        self.entries.append(entry)
        self.num_samples += entry.samples
        self._id_chunks.append(ids)

    def build(self) -> ScheduledBatch:
        """Make the batch's arrays."""
        entries = tuple(self.entries)
        _, _, rows, starts, query_lens, _, samples, carries, output_positions = map(_column, zip(*entries, strict=True))
        ends = starts + query_lens
        token_ends = np.cumsum(query_lens, dtype=np.int32)
        input_ids = self._input_ids()
        if len(input_ids) == len(entries):
            positions, token_rows = starts, rows
        else:
            first = np.repeat(ends - token_ends, query_lens)
            positions = first + np.arange(len(input_ids), dtype=np.int32)
            token_rows = np.repeat(rows, query_lens)
        carry = np.full(len(input_ids), -1, dtype=np.int32)
        carried = carries.nonzero()[0]
        carry[token_ends[carried] - 1] = rows[carried]
        sampling = samples.nonzero()[0]
        all_sample = len(sampling) == len(entries)
        return ScheduledBatch(
            step=self.step,
            entries=entries,
            input_ids=input_ids,
            positions=positions,
            carry=carry,
            token_rows=token_rows,
            query_lens=query_lens,
            seq_lens=ends,
            rows=rows,
            sample_tokens=(token_ends if all_sample else token_ends[sampling]) - 1,
            sample_rows=rows if all_sample else rows[sampling],
            output_positions=output_positions if all_sample else output_positions[sampling],
            random_samples=np.array(self.random_samples, dtype=np.int32),
            needs_filter=self.needs_filter,
            table_changes=tuple(self.table_changes),
            row_inits=tuple(self.row_inits),
            masked_tokens=tuple(self.masked_tokens),
            wide=self.wide.build(),
            logprobs=self.logprobs.build(),
        )

    def _input_ids(self) -> Int32Array:
        singles = np.array(self._ids, dtype=np.int32)
        return np.concatenate([singles, *self._id_chunks]) if self._id_chunks else singles


def _column(values: tuple[int, ...]) -> Int32Array:
    return np.array(values, dtype=np.int32)
