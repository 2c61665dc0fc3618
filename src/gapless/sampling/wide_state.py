"""Sampling state that is as wide as the vocabulary, or a history: :class:`WideState`.

Few requests use it, and a row of it is large. So it has rows of its own, *wide rows*, which a request holds beside its
row while it is resident, and a step names the samples that use each part; the others pay nothing. The order is that of
vLLM: biases and forbidden ids, penalties, bad words. Compute stream only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.sampling.bad_words import BadWordTable, WordInits
from gapless.sampling.penalties import PenaltyInits, PenaltyKernel, PenaltyTable, apply_penalties
from gapless.sampling.row_samples import RowSamples
from gapless.sampling.token_bias import BiasInits, BiasTable

__all__ = ["WideInits", "WideSamples", "WideState"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WideInits:
    """What new requests bring, for each part that one of them uses."""

    penalties: PenaltyInits | None
    biases: BiasInits | None
    words: WordInits | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WideSamples:
    """The samples of a step that use each part."""

    penalised: RowSamples | None
    biased: RowSamples | None
    worded: RowSamples | None


class WideState:
    """The three tables.

    Args:
        num_rows: how many wide rows there are.
        vocab_size: width of the logits.
        device: where the tables live, from the first request on that needs them.
        penalty_kernel: a faster :func:`~gapless.sampling.penalties.apply_penalties`, if there is one.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        vocab_size: int,
        device: torch.device,
        penalty_kernel: PenaltyKernel = apply_penalties,
    ) -> None:
        self._penalties = PenaltyTable(num_rows=num_rows, vocab_size=vocab_size, device=device, kernel=penalty_kernel)
        self._biases = BiasTable(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._words = BadWordTable(num_rows=num_rows, device=device)

    def set_rows(self, inits: WideInits) -> None:
        """Give wide rows to new requests."""
        if inits.penalties is not None:
            self._penalties.set_rows(inits.penalties)
        if inits.biases is not None:
            self._biases.set_rows(inits.biases)
        if inits.words is not None:
            self._words.set_rows(inits.words)

    def apply(self, logits: Tensor, wide: WideSamples) -> None:
        """Change the logits, ``[num_samples, vocab_size]``, fp32, in place."""
        if wide.biased is not None:
            self._biases.apply(logits, wide.biased)
        if wide.penalised is not None:
            self._penalties.apply(logits, wide.penalised)
        if wide.worded is not None:
            self._words.apply(logits, wide.worded)

    def update(self, wide: WideSamples, tokens: Tensor) -> None:
        """Add the tokens, ``[num_samples]``, int64, that were just sampled to the histories."""
        if wide.penalised is not None:
            self._penalties.update(wide.penalised, tokens)
        if wide.worded is not None:
            self._words.update(wide.worded, tokens)
