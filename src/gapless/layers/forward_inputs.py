"""What a forward pass reads: :class:`ForwardInputs`, passed explicitly to every layer (there is no ambient context).

Every tensor is on the device and is read on the compute stream only. ``host_*`` fields are plain Python copies of
numbers that the host knows anyway (counts and lengths, never token values), so that no layer needs a host sync.
"""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["ForwardInputs", "StepBounds", "TokenInputs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """``input_ids``, ``positions`` and ``slot_mapping`` of a :class:`ForwardInputs`, while it is being made."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBounds:
    """What the host tells of a step that has to be right for any lengths: the most entries it may have.

    Attributes:
        decodes: of one token.
        prefills: of several tokens.
    """

    decodes: int
    prefills: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """One step's model inputs: ``num_entries`` requests with ``num_tokens`` new tokens in all, not padded in between.

    Entry ``i`` has the tokens ``[query_starts[i], query_starts[i + 1])`` of the flat token axis; they sit at the last
    positions of its context of ``seq_lens[i]`` tokens. A step may be padded at its end with entries of one token at
    position 0 on the reserved row, whose block table names the reserved block 0; a step with ``bounds`` is padded with
    tokens of no entry, written to slot 0, and with entries of no token.

    Attributes:
        input_ids: ``[num_tokens]``, int64. Carry-over has been applied.
        positions: ``[num_tokens]``, int64.
        slot_mapping: ``[num_tokens]``, int64: where each token's K and V go, ``block * block_size + offset``.
        query_starts: ``[num_entries + 1]``, int32.
        seq_lens: ``[num_entries]``, int32: context length with this step's tokens.
        rows: ``[num_entries]``, int32: which row of ``block_tables`` an entry uses.
        block_tables: ``[max_rows + 1, max_blocks_per_row]``, int32.
        logits_indices: ``[num_samples]``, int64: the tokens (flat axis) whose logits are wanted.
        host_query_lens: ``query_starts`` as differences, for each entry; empty in a step with ``bounds``.
        host_seq_lens: ``seq_lens``, for each entry; empty in a step that is recorded as a graph, which has to be right
            for any lengths.
        bounds: of a step whose entries have any lengths.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    rows: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    host_query_lens: tuple[int, ...]
    host_seq_lens: tuple[int, ...]
    bounds: StepBounds | None = None
