"""What is added to the logits of single tokens: :class:`BiasTable`, for ``logit_bias`` and ids that are not allowed.

A wide row is one fp32 number per token of the vocabulary: the request's bias, or -inf for a token that may never come
(outside ``allowed_token_ids``, or a bad word of one token). It does not change while the request is there. The memory
is taken when the first request asks. Compute stream only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.sampling.row_samples import RowSamples

__all__ = ["BiasInits", "BiasTable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasInits:
    """What new requests bring.

    Attributes:
        rows: ``[n]``, int64: their wide rows.
        fills: ``[n]``, fp32: what every token gets that is not named: 0, or -inf where only some are allowed.
        entry_rows, entry_ids: ``[m]``, int64: the named tokens, each at most once a row.
        entry_values: ``[m]``, fp32: what they get.
    """

    rows: Tensor
    fills: Tensor
    entry_rows: Tensor
    entry_ids: Tensor
    entry_values: Tensor


class BiasTable:
    """Biases by wide row."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = num_rows, vocab_size
        self._device = device
        self._table: Tensor | None = None

    def set_rows(self, inits: BiasInits) -> None:
        """Give wide rows to new requests."""
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        self._table.index_copy_(0, inits.rows, inits.fills[:, None].expand(-1, self._shape[1]))
        places = inits.entry_rows * self._shape[1] + inits.entry_ids
        self._table.view(-1).index_copy_(0, places, inits.entry_values)

    def apply(self, logits: Tensor, which: RowSamples) -> None:
        """Add to the logits, ``[num_samples, vocab_size]``, of some samples in place."""
        assert self._table is not None
        logits.index_add_(0, which.samples, self._table.index_select(0, which.rows))
