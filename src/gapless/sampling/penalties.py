"""Repetition, frequency and presence penalties: :class:`PenaltyTable`, the history that they look at.

The table has a row of one 32-bit word per token of the vocabulary for each request that asks (a *wide row*): how often
the token stands in the output, and one bit for "it stands in the prompt". It is written by the step that samples, on
the compute stream, so it is exact however far the host lags behind. Admission brings a request's whole history, since
tokens whose KV is cached never pass through a step's input ids.

The memory is taken when the first request asks. Compute stream only.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gapless.sampling.row_samples import RowSamples

__all__ = ["PROMPT_BIT", "PenaltyInits", "PenaltyKernel", "PenaltyTable", "apply_penalties"]

PROMPT_BIT = 1 << 30
"""Set in a token's word when it stands in the prompt; the bits below count it in the output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyInits:
    """What new requests bring.

    Attributes:
        rows: ``[n]``, int64: their wide rows.
        values: ``[n, 3]``, fp32: repetition, frequency and presence penalty.
        prompt_rows, prompt_ids: ``[p]``, int64: the tokens of their prompts, in any order, repeated or not.
        output_rows, output_ids: ``[o]``, int64: each token that they have sampled before (in an earlier stay).
    """

    rows: Tensor
    values: Tensor
    prompt_rows: Tensor
    prompt_ids: Tensor
    output_rows: Tensor
    output_ids: Tensor


class PenaltyKernel(Protocol):
    """Changes logits in place; see :func:`apply_penalties`."""

    def __call__(self, logits: Tensor, samples: Tensor, rows: Tensor, history: Tensor, values: Tensor) -> None:
        """Apply."""


def apply_penalties(logits: Tensor, samples: Tensor, rows: Tensor, history: Tensor, values: Tensor) -> None:
    """Penalise tokens that were there before.

    Repetition (Keskar et al., "CTRL", arXiv 1909.05858) divides a positive logit and multiplies any other, for tokens
    of prompt and output. Frequency and presence are then subtracted, per occurrence and once, for output tokens alone.

    Args:
        logits: ``[num_samples, vocab_size]``, fp32, changed in place.
        samples, rows: ``[n]``, int64: the samples that are penalised, and their wide rows.
        history: ``[num_wide_rows, vocab_size]``, int32.
        values: ``[num_wide_rows, 3]``, fp32: repetition, frequency, presence.
    """
    words = history.index_select(0, rows)
    repetition, frequency, presence = values.index_select(0, rows).unsqueeze(1).unbind(-1)
    counts = words & (PROMPT_BIT - 1)
    x = logits.index_select(0, samples)
    x = torch.where(words != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - frequency * counts - presence * (counts > 0)
    logits.index_copy_(0, samples, x)


class PenaltyTable:
    """Histories and penalties by wide row."""

    def __init__(
        self, *, num_rows: int, vocab_size: int, device: torch.device, kernel: PenaltyKernel = apply_penalties
    ) -> None:
        self._shape = num_rows, vocab_size
        self._kernel = kernel
        self._values = torch.zeros((num_rows, 3), dtype=torch.float32, device=device)
        self._history: Tensor | None = None

    def set_rows(self, inits: PenaltyInits) -> None:
        """Give wide rows to new requests, with their history."""
        if self._history is None:
            self._history = torch.zeros(self._shape, dtype=torch.int32, device=self._values.device)
        self._values.index_copy_(0, inits.rows, inits.values)
        self._history.index_fill_(0, inits.rows, 0)
        flat, vocab_size = self._history.view(-1), self._shape[1]
        flat.index_fill_(0, inits.prompt_rows * vocab_size + inits.prompt_ids, PROMPT_BIT)
        output = inits.output_rows * vocab_size + inits.output_ids
        flat.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: Tensor, which: RowSamples) -> None:
        """Penalise the logits, ``[num_samples, vocab_size]``, of some samples in place."""
        assert self._history is not None
        self._kernel(logits, which.samples, which.rows, self._history, self._values)

    def update(self, which: RowSamples, tokens: Tensor) -> None:
        """Count the tokens, ``[num_samples]``, int64, that were just sampled."""
        assert self._history is not None
        places = which.rows * self._shape[1] + tokens.index_select(0, which.samples)
        self._history.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
