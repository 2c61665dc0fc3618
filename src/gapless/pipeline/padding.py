"""The sizes that steps are padded to, and how: :class:`StepBuckets`.

The idea: a graph is bound to shapes, so steps that are to be replayed come in few of them. A plain decode step, in
which every entry has one token and samples, is padded to a number of entries. Any other step of few tokens, one with a
short prompt or with the end of a long one, is *mixed* and padded to a number of tokens, and its entries to as many as
there are rows. Larger steps keep the device busy for longer than the host needs to launch their kernels, and are left
as they are.

What pads can harm nobody: it is token 0 at position 0 of the reserved row, whose block table names the reserved block,
and it carries nothing. (Padding with slot -1 writes the last block: test_c15.)

No state; engine thread.
"""

from dataclasses import dataclass, replace

import numpy as np

from gapless.layers.forward_inputs import StepBounds
from gapless.pipeline.batch import Int32Array, ScheduledBatch

__all__ = ["StepBuckets", "decode_buckets", "idle_decode_batch", "idle_mixed_batch", "mixed_buckets"]


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Sizes that decode steps are padded to, in entries, ascending, the last one ``max_rows``.

    Steps of 8 up to 64, of 16 from 128 to 256 and of 32 above: 33 requests run as 40, not as 64. Between 64 and 128
    there is none: all of them read the weights for as long, and the library chooses slower products for fewer tokens
    (Llama-3.1-8B on an H200, ``benchmarks/kernels/decode_step.py``).
    """
    sizes = (1, 2, 4, *range(8, 65, 8), *range(128, 256, 16), *range(256, max_rows, 32))
    return (*(size for size in sizes if size < max_rows), max_rows)


def mixed_buckets(most: int) -> tuple[int, ...]:
    """Sizes that mixed steps are padded to, in tokens, ascending and at most ``most``; none if that is below 16.

    Up to 128 tokens a step reads the weights for as long as for one, so that few sizes do: those at which other kernels
    take over. Above, tokens cost time, but the library's products come in steps, too: on an H200 those of 224 tokens of
    Llama-3.1-8B take as long as those of 256, and those of 448 longer than those of 512
    (``benchmarks/kernels/library_products.py``).
    """
    sizes = (16, 32, 64, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
    return tuple(size for size in sizes if size <= most)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBuckets:
    """Sizes to pad to; none by default, which pads nothing.

    Attributes:
        num_rows: rows for requests; the row of this number is the reserved one.
        decode: numbers of entries, ascending.
        mixed: numbers of tokens, ascending.
    """

    num_rows: int
    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def pad(self, batch: ScheduledBatch) -> ScheduledBatch:
        """``batch`` padded to the next size of its kind; a step that is larger than all of them is not padded."""
        num_tokens, num_entries = len(batch.input_ids), len(batch.rows)
        if num_tokens == num_entries == len(batch.sample_rows):
            size = next((bucket for bucket in self.decode if bucket >= num_entries), num_entries)
            return _pad_decode(batch, size, self.num_rows) if size > num_entries else batch
        for size in self.mixed:
            if size >= num_tokens:
                fits = np.count_nonzero(batch.query_lens > 1) <= _bounds(size, self.num_rows).prefills
                return _pad_mixed(batch, size, self.num_rows) if fits else batch
        return batch


def _bounds(num_tokens: int, num_rows: int) -> StepBounds:
    """What launches are sized for. Prompts shorter than 8 tokens do not come by the dozen."""
    return StepBounds(decodes=min(num_tokens, num_rows), prefills=min(max(4, num_tokens // 8), num_rows))


def idle_decode_batch(size: int, reserved_row: int) -> ScheduledBatch:
    """A decode step of ``size`` entries in which nobody takes part: nothing but padding, which gives no result."""
    return _pad_decode(_empty_batch(), size, reserved_row)


def idle_mixed_batch(size: int, num_rows: int) -> ScheduledBatch:
    """A mixed step of ``size`` tokens in which nobody takes part."""
    return _pad_mixed(_empty_batch(), size, num_rows)


def _pad_decode(batch: ScheduledBatch, size: int, reserved_row: int) -> ScheduledBatch:
    """Entries of one token, which sample."""
    extra = size - len(batch.entries)
    return replace(
        _pad(batch, tokens=extra, entries=extra, entry_tokens=1, row=reserved_row),
        sample_tokens=np.arange(size, dtype=np.int32),
        sample_rows=_padded(batch.sample_rows, extra, reserved_row),
        output_positions=_padded(batch.output_positions, extra, 0),
    )


def _pad_mixed(batch: ScheduledBatch, size: int, num_rows: int) -> ScheduledBatch:
    """Tokens of no entry, and entries of no token; samples are not padded, since no graph reads them."""
    tokens, entries = size - len(batch.input_ids), num_rows - len(batch.rows)
    padded = _pad(batch, tokens=tokens, entries=entries, entry_tokens=0, row=num_rows)
    return replace(padded, bounds=_bounds(size, num_rows))


def _pad(batch: ScheduledBatch, *, tokens: int, entries: int, entry_tokens: int, row: int) -> ScheduledBatch:
    """Add so many tokens, and so many entries which have ``entry_tokens`` each, all of the reserved row ``row``."""
    return replace(
        batch,
        input_ids=_padded(batch.input_ids, tokens, 0),
        positions=_padded(batch.positions, tokens, 0),
        carry=_padded(batch.carry, tokens, -1),
        token_rows=_padded(batch.token_rows, tokens, row),
        query_lens=_padded(batch.query_lens, entries, entry_tokens),
        seq_lens=_padded(batch.seq_lens, entries, entry_tokens),
        rows=_padded(batch.rows, entries, row),
    )


def _padded(values: Int32Array, extra: int, fill: int) -> Int32Array:
    return np.concatenate([values, np.full(extra, fill, dtype=np.int32)])


def _empty_batch() -> ScheduledBatch:
    none = np.zeros(0, dtype=np.int32)
    return ScheduledBatch(
        step=-1,
        entries=(),
        input_ids=none,
        positions=none,
        carry=none,
        token_rows=none,
        query_lens=none,
        seq_lens=none,
        rows=none,
        sample_tokens=none,
        sample_rows=none,
        output_positions=none,
        random_samples=none,
        needs_filter=False,
        table_changes=(),
        row_inits=(),
        masked_tokens=(),
    )
