"""Words of several tokens that may not come up: :class:`BadWordTable`.

Only the last token of a word is forbidden, and only where the tokens before it are those of the word. So a wide row
holds the request's words and its latest tokens, prompt included; the step that samples shifts its token in, on the
compute stream, and the host need not have seen it. Words of one token are biases (:mod:`gapless.sampling.token_bias`).

Compute stream only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.sampling.row_samples import RowSamples
from gapless.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS

__all__ = ["ANY_TOKEN", "MAX_WORDS", "MAX_WORD_TOKENS", "NO_TOKEN", "NUM_RECENT", "BadWordTable", "WordInits"]

MAX_WORDS = MAX_BAD_WORDS
"""Most words of one request that have several tokens."""
MAX_WORD_TOKENS = MAX_BAD_WORD_TOKENS
"""Most tokens of a word."""
NUM_RECENT = MAX_WORD_TOKENS - 1
"""How many of a row's latest tokens are kept."""
ANY_TOKEN = -1
"""Fills a shorter word from the left: every token fits there."""
NO_TOKEN = -2
"""Fills unused words, and the latest tokens of a row that has fewer: no token fits there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WordInits:
    """What new requests bring.

    Attributes:
        rows: ``[n]``, int64: their wide rows.
        words: ``[n, MAX_WORDS, MAX_WORD_TOKENS]``, int32.
        recent: ``[n, NUM_RECENT]``, int32: the latest tokens, the last one at the end.
    """

    rows: Tensor
    words: Tensor
    recent: Tensor


class BadWordTable:
    """Words and latest tokens by wide row."""

    def __init__(self, *, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._words: Tensor | None = None
        self._recent: Tensor | None = None

    def set_rows(self, inits: WordInits) -> None:
        """Give wide rows to new requests."""
        if self._words is None or self._recent is None:
            shape = self._num_rows, MAX_WORDS, MAX_WORD_TOKENS
            self._words = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=self._device)
            self._recent = torch.full((self._num_rows, NUM_RECENT), NO_TOKEN, dtype=torch.int32, device=self._device)
        self._words.index_copy_(0, inits.rows, inits.words)
        self._recent.index_copy_(0, inits.rows, inits.recent)

    def apply(self, logits: Tensor, which: RowSamples) -> None:
        """Forbid the tokens that would complete a word, in place; ``logits`` are ``[num_samples, vocab_size]``."""
        assert self._words is not None
        assert self._recent is not None
        words = self._words.index_select(0, which.rows)
        recent = self._recent.index_select(0, which.rows)
        before, last = words[..., :-1], words[..., -1]
        fits = ((before == recent[:, None]) | (before == ANY_TOKEN)).all(dim=-1) & (last >= 0)
        # Adding zero or -inf gives the same whatever the order in which equal places are added to.
        change = torch.zeros_like(fits, dtype=logits.dtype).masked_fill_(fits, -torch.inf)
        places = which.samples[:, None] * logits.shape[1] + last.clamp(min=0)
        logits.view(-1).index_add_(0, places.view(-1), change.view(-1))

    def update(self, which: RowSamples, tokens: Tensor) -> None:
        """Remember the tokens, ``[num_samples]``, int64, that were just sampled."""
        assert self._recent is not None
        kept = self._recent.index_select(0, which.rows)[:, 1:]
        new = tokens.index_select(0, which.samples).to(torch.int32)
        self._recent.index_copy_(0, which.rows, torch.cat((kept, new[:, None]), dim=1))
