"""A model that is a hash of all KV it reads through the block table: :class:`HashModel`.

It has two layers. The first layer's KV of a position is a hash of its token; the second's is a hash of the first's
KV of all positions so far; the logits are picked by a hash of the second's. As in a real model each layer writes the
whole step's KV before it reads, and a wrong block, a stale block or a wrong token anywhere in the context changes
everything that follows. The cache is full of junk at the start.

``poison`` is a token whose KV is not a number: whoever has it in the context gets NaN logits.

Used on the compute stream only. :mod:`simulation.solo` computes the same without blocks, batches or streams.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from gapless.layers.forward_inputs import ForwardInputs

__all__ = ["NOT_A_NUMBER", "VOCAB_SIZE", "HashModel", "attend", "embed", "logits_row", "logits_table"]

VOCAB_SIZE = 61
NOT_A_NUMBER = -1
_NUM_ROWS = 1021


def embed(token: int, position: int, poison: int | None) -> int:
    """First layer's KV of a token at a position."""
    return NOT_A_NUMBER if token == poison else hash((token, position))


def attend(context: Sequence[int]) -> int:
    """What a query sees of the KV of all positions up to its own."""
    return NOT_A_NUMBER if NOT_A_NUMBER in context else hash(tuple(context))


def logits_row(state: int) -> int:
    """Which row of :func:`logits_table` a state picks; the last row is NaN."""
    return _NUM_ROWS if state == NOT_A_NUMBER else state % _NUM_ROWS


@lru_cache(maxsize=1)
def logits_table() -> Tensor:
    """``[1022, VOCAB_SIZE]``, fp32: rows of random logits, the last one NaN."""
    table = torch.randn(_NUM_ROWS + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 2
    table[_NUM_ROWS] = torch.nan
    return table


class HashModel:
    """KV of ``num_blocks + 1`` blocks (block 0 is the reserved one), and the forward pass over it."""

    def __init__(self, *, num_blocks: int, block_size: int, seed: int, poison: int | None = None) -> None:
        junk = random.Random(f"junk-{seed}")
        slots = (num_blocks + 1) * block_size
        self.first = [junk.getrandbits(60) for _ in range(slots)]
        self.second = [junk.getrandbits(60) for _ in range(slots)]
        self._block_size = block_size
        self._poison = poison

    vocab_size = VOCAB_SIZE

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """Write both layers' KV and return ``[num_samples, VOCAB_SIZE]``, fp32."""
        return self.logits(self._rows(inputs, inputs.logits_indices.tolist()))

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        """Write both layers' KV and return which row of logits each token picks, ``[num_tokens]``."""
        return self._rows(inputs, range(len(inputs.positions)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return ``[n, VOCAB_SIZE]``, fp32."""
        return logits_table()[hidden]

    def _rows(self, inputs: ForwardInputs, indices: Sequence[int]) -> Tensor:
        slots = inputs.slot_mapping.tolist()
        for token, position, slot in zip(inputs.input_ids.tolist(), inputs.positions.tolist(), slots, strict=True):
            self.first[slot] = embed(token, position, self._poison)
        starts = inputs.query_starts.tolist()
        lengths = inputs.seq_lens.tolist()
        # A recorded step is told no lengths, and one with bounds no entry's tokens: what is recorded has to be right
        # for all of them.
        told_lengths = inputs.host_seq_lens or lengths
        told_tokens = inputs.host_query_lens or [end - start for start, end in pairwise(starts)]
        self._check_bounds(inputs, starts)
        tables = [inputs.block_tables[row].tolist() for row in inputs.rows.tolist()]
        states: list[int] = []
        for entry, table in enumerate(tables):
            num_new = starts[entry + 1] - starts[entry]
            told = told_tokens[entry], told_lengths[entry]
            assert (num_new, lengths[entry]) == told, f"device inputs {num_new, lengths[entry]} are not those of {told}"
            context = self._gather(self.first, table, lengths[entry])
            states += [attend(context[:end]) for end in range(lengths[entry] - num_new + 1, lengths[entry] + 1)]
        num_owned = len(states)  # padding may be of no entry, and is written nevertheless
        for slot, state in zip(slots, states + [0] * (len(slots) - num_owned), strict=True):
            self.second[slot] = state
        picked: list[int] = []
        for index in indices:
            if index >= num_owned:
                picked.append(0)
                continue
            entry = bisect_right(starts, index) - 1
            end = lengths[entry] - (starts[entry + 1] - 1 - index)
            picked.append(logits_row(attend(self._gather(self.second, tables[entry], end))))
        return torch.tensor(picked, dtype=torch.int64)

    def _check_bounds(self, inputs: ForwardInputs, starts: list[int]) -> None:
        bounds = inputs.bounds
        if bounds is None:
            assert starts[-1] == len(inputs.positions), "only a step with bounds has tokens of no entry"
            return
        assert inputs.host_query_lens == inputs.host_seq_lens == (), "a step with bounds is told lengths"
        counts = [end - start for start, end in pairwise(starts)]
        assert sum(count == 1 for count in counts) <= bounds.decodes
        assert sum(count > 1 for count in counts) <= bounds.prefills

    def _gather(self, layer: list[int], table: list[int], length: int) -> list[int]:
        size = self._block_size
        context: list[int] = []
        for block in table[: -(-length // size)]:
            context += layer[block * size : (block + 1) * size]
        return context[:length]
