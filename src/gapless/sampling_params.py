"""How the tokens of one request are chosen and when it ends: :class:`SamplingParams`.

Values are checked where they are made, in the caller, so that nothing wrong is ever queued. Checks that need the
vocabulary (:meth:`SamplingParams.check_vocabulary`) are made when a request meets its engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from gapless.errors import RequestError

__all__ = ["MAX_STOP_TOKEN_IDS", "SamplingParams"]

MAX_STOP_TOKEN_IDS = 64
_INT63 = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Sampling options of one request, under the names vLLM's users know.

    Args:
        temperature: 0 is greedy; any other finite positive value divides the logits, in fp32.
        top_k: keep the k most likely tokens; 0 and -1 keep all; above the vocabulary it is clamped.
        top_p: keep the smallest set of tokens whose probability reaches ``top_p``, in (0, 1]; at least one is kept.
        min_p: drop tokens less likely than ``min_p`` times the most likely one, in [0, 1].
        seed: makes the request reproducible whatever runs beside it; ``None`` draws a fresh one.
        max_tokens: at most this many tokens are sampled; ``None`` means as many as the context holds.
        min_tokens: no EOS and no ``stop_token_ids`` is sampled before this many tokens.
        stop_token_ids: ids that end the request as EOS does (at most 64).
        ignore_eos: run past EOS; ``stop_token_ids`` still end the request.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: make text; ``False`` returns ids alone.

    Raises:
        RequestError: (a ``ValueError``) naming field and value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise _bad("temperature", self.temperature, "must be 0 (greedy) or positive")
        self._check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise _bad("top_p", self.top_p, "must be in (0, 1]")
        self._check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise _bad("min_p", self.min_p, "must be in [0, 1]")
        self._check_integer("top_k", self.top_k)
        if self.top_k < -1:
            raise _bad("top_k", self.top_k, "must be -1 or 0 (off) or positive")
        if self.seed is not None:
            self._check_integer("seed", self.seed)
            if not -_INT63 <= self.seed < _INT63:
                raise _bad("seed", self.seed, "must fit into 64 bits")
        self._check_counts()
        self._check_stop_token_ids()
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be true or false")

    @property
    def greedy(self) -> bool:
        """Whether every token is the most likely one."""
        return self.temperature == 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`RequestError` if a token id is outside ``[0, vocab_size)``."""
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise _bad("stop_token_ids", token, f"is not in the vocabulary of {vocab_size} tokens")

    def _check_counts(self) -> None:
        if self.max_tokens is not None:
            self._check_integer("max_tokens", self.max_tokens)
            if self.max_tokens < 0:
                raise _bad("max_tokens", self.max_tokens, "must not be negative")
        self._check_integer("min_tokens", self.min_tokens)
        if self.min_tokens < 0:
            raise _bad("min_tokens", self.min_tokens, "must not be negative")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"must not be above max_tokens={self.max_tokens}")

    def _check_stop_token_ids(self) -> None:
        ids = self.stop_token_ids
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
            raise _bad("stop_token_ids", ids, "must be a list of token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
        for token in ids:
            self._check_integer("stop_token_ids", token)
            if not 0 <= token < 2**31:
                raise _bad("stop_token_ids", token, "must be a token id of the vocabulary")
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @staticmethod
    def _check_number(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _bad(name, value, "must be a finite number")

    @staticmethod
    def _check_integer(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _bad(name, value, "must be an integer")


def _bad(name: str, value: object, why: str) -> RequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return RequestError(f"{name}={shown} {why}")
