"""What a step says about wide rows: :class:`WideWork`, its fields in the packed buffer, and their way onto the device.

A wide row holds sampling state of one request that is as wide as the vocabulary, or a history (penalties, biases, bad
words). A step brings the state of requests that it admits, the whole history included, and names the samples that use
each part. All of it lies in the tail of the packed input; a step without such requests writes and copies nothing.

The host's half belongs to the engine thread; :func:`wide_inits` and :func:`wide_samples` run on the compute stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gapless.sampling.bad_words import MAX_WORD_TOKENS, MAX_WORDS, NUM_RECENT, WordInits
from gapless.sampling.penalties import PenaltyInits
from gapless.sampling.row_samples import RowSamples
from gapless.sampling.token_bias import BiasInits
from gapless.sampling.wide_state import WideInits, WideSamples

__all__ = [
    "WIDE_FIELDS",
    "BiasInit",
    "PenaltyInit",
    "WideBuilder",
    "WideLimits",
    "WideWork",
    "WordInit",
    "wide_capacity",
    "wide_inits",
    "wide_samples",
    "wide_sizes",
    "write_wide",
]

_Ids = NDArray[np.int32]

# (name, which size, numpy dtype, torch dtype), as in the layout of a step.
WIDE_FIELDS: tuple[tuple[str, str, type[np.generic], torch.dtype], ...] = (
    ("penalised_samples", "penalised", np.int32, torch.int32),
    ("penalised_rows", "penalised", np.int32, torch.int32),
    ("biased_samples", "biased", np.int32, torch.int32),
    ("biased_rows", "biased", np.int32, torch.int32),
    ("worded_samples", "worded", np.int32, torch.int32),
    ("worded_rows", "worded", np.int32, torch.int32),
    ("penalty_rows", "penalty_inits", np.int32, torch.int32),
    ("penalty_values", "penalty_values", np.float32, torch.float32),
    ("prompt_rows", "prompt_history", np.int32, torch.int32),
    ("prompt_ids", "prompt_history", np.int32, torch.int32),
    ("output_rows", "output_history", np.int32, torch.int32),
    ("output_ids", "output_history", np.int32, torch.int32),
    ("bias_rows", "bias_inits", np.int32, torch.int32),
    ("bias_fills", "bias_inits", np.float32, torch.float32),
    ("bias_entry_rows", "bias_entries", np.int32, torch.int32),
    ("bias_entry_ids", "bias_entries", np.int32, torch.int32),
    ("bias_entry_values", "bias_entries", np.float32, torch.float32),
    ("word_rows", "word_inits", np.int32, torch.int32),
    ("word_tokens", "word_tokens", np.int32, torch.int32),
    ("word_recent", "word_recent", np.int32, torch.int32),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WideLimits:
    """How much of it there is, and how much of it one step may bring.

    Attributes:
        max_rows: wide rows; a request that needs one waits while none is free.
        max_history: tokens of admitted histories in a step; at least the longest context.
        max_biases: tokens with a bias of their own in a step; at least the vocabulary.
        max_word_inits: requests with bad words of several tokens that a step admits.
    """

    max_rows: int = 0
    max_history: int = 0
    max_biases: int = 0
    max_word_inits: int = 0

    @staticmethod
    def of_engine(*, max_rows: int, vocab_size: int, max_model_len: int) -> "WideLimits":
        """Limits for an engine: a wide row for each row, as long as a table of them stays below 1 GiB."""
        return WideLimits(
            max_rows=min(max_rows, max(1, (1 << 30) // (4 * vocab_size))),
            max_history=max(max_model_len, 65_536),
            max_biases=max(vocab_size, 65_536),
            max_word_inits=16,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PenaltyInit:
    """Penalties, and the known tokens, of a request that enters; int32 ids."""

    row: int
    repetition: float
    frequency: float
    presence: float
    prompt: _Ids
    output: _Ids


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasInit:
    """Biases of a request that enters: ``fill`` for every token that is not among ``ids``."""

    row: int
    fill: float
    ids: _Ids
    values: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class WordInit:
    """Bad words, ``[MAX_WORDS * MAX_WORD_TOKENS]``, and latest tokens, ``[NUM_RECENT]``, of a request that enters."""

    row: int
    words: _Ids
    recent: _Ids


@dataclass(kw_only=True, slots=True)
class WideBuilder:
    """Collects a step's work on wide rows; ``*_samples`` and ``*_rows`` go together."""

    penalties: list[PenaltyInit] = field(default_factory=list)
    biases: list[BiasInit] = field(default_factory=list)
    words: list[WordInit] = field(default_factory=list)
    penalised_samples: list[int] = field(default_factory=list)
    penalised_rows: list[int] = field(default_factory=list)
    biased_samples: list[int] = field(default_factory=list)
    biased_rows: list[int] = field(default_factory=list)
    worded_samples: list[int] = field(default_factory=list)
    worded_rows: list[int] = field(default_factory=list)
    num_history: int = 0
    num_biases: int = 0

    def build(self) -> "WideWork | None":
        """The step's work; ``None`` if there is none."""
        inits = self.penalties or self.biases or self.words
        if not (inits or self.penalised_samples or self.biased_samples or self.worded_samples):
            return None
        return WideWork(
            penalties=tuple(self.penalties),
            biases=tuple(self.biases),
            words=tuple(self.words),
            penalised_samples=tuple(self.penalised_samples),
            penalised_rows=tuple(self.penalised_rows),
            biased_samples=tuple(self.biased_samples),
            biased_rows=tuple(self.biased_rows),
            worded_samples=tuple(self.worded_samples),
            worded_rows=tuple(self.worded_rows),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WideWork:
    """What a :class:`WideBuilder` has collected."""

    penalties: tuple[PenaltyInit, ...]
    biases: tuple[BiasInit, ...]
    words: tuple[WordInit, ...]
    penalised_samples: tuple[int, ...]
    penalised_rows: tuple[int, ...]
    biased_samples: tuple[int, ...]
    biased_rows: tuple[int, ...]
    worded_samples: tuple[int, ...]
    worded_rows: tuple[int, ...]

    @property
    def has_inits(self) -> bool:
        """Whether a request enters."""
        return bool(self.penalties or self.biases or self.words)


def wide_sizes(work: WideWork | None) -> dict[str, int]:
    """The sizes that :data:`WIDE_FIELDS` names."""
    if work is None:
        return {}
    return {
        "penalised": len(work.penalised_samples),
        "biased": len(work.biased_samples),
        "worded": len(work.worded_samples),
        "penalty_inits": len(work.penalties),
        "penalty_values": 3 * len(work.penalties),
        "prompt_history": sum(len(init.prompt) for init in work.penalties),
        "output_history": sum(len(init.output) for init in work.penalties),
        "bias_inits": len(work.biases),
        "bias_entries": sum(len(init.ids) for init in work.biases),
        "word_inits": len(work.words),
        "word_tokens": len(work.words) * MAX_WORDS * MAX_WORD_TOKENS,
        "word_recent": len(work.words) * NUM_RECENT,
    }


def wide_capacity(limits: WideLimits, max_rows: int) -> dict[str, int]:
    """The largest sizes of a step of at most ``max_rows`` samples."""
    most = min(limits.max_rows, max_rows)
    return {
        "penalised": most,
        "biased": most,
        "worded": most,
        "penalty_inits": limits.max_rows,
        "penalty_values": 3 * limits.max_rows,
        # Prompt and output share the limit; each of them is rounded up to whole words.
        "prompt_history": limits.max_history + 2,
        "output_history": 2,
        "bias_inits": limits.max_rows,
        "bias_entries": limits.max_biases,
        "word_inits": limits.max_word_inits,
        "word_tokens": limits.max_word_inits * MAX_WORDS * MAX_WORD_TOKENS,
        "word_recent": limits.max_word_inits * NUM_RECENT,
    }


def write_wide(put: Callable[[str, ArrayLike], None], work: WideWork) -> None:
    """Give each field that is not empty to ``put``."""
    for name in ("penalised", "biased", "worded"):
        if samples := getattr(work, f"{name}_samples"):
            put(f"{name}_samples", samples)
            put(f"{name}_rows", getattr(work, f"{name}_rows"))
    if penalties := work.penalties:
        put("penalty_rows", [init.row for init in penalties])
        put("penalty_values", [x for init in penalties for x in (init.repetition, init.frequency, init.presence)])
        _put_by_row(put, "prompt", [init.row for init in penalties], [init.prompt for init in penalties])
        _put_by_row(put, "output", [init.row for init in penalties], [init.output for init in penalties])
    if biases := work.biases:
        put("bias_rows", [init.row for init in biases])
        put("bias_fills", [init.fill for init in biases])
        _put_by_row(put, "bias_entry", [init.row for init in biases], [init.ids for init in biases])
        put("bias_entry_values", np.concatenate([init.values for init in biases]))
    if words := work.words:
        put("word_rows", [init.row for init in words])
        put("word_tokens", np.concatenate([init.words for init in words]))
        put("word_recent", np.concatenate([init.recent for init in words]))


def wide_inits(work: WideWork, view: Callable[[str], Tensor]) -> WideInits:
    """What entering requests bring, on the device; ``view`` gives the fields."""

    def ids(name: str) -> Tensor:
        return view(name).to(torch.int64)

    penalties = biases = words = None
    if work.penalties:
        penalties = PenaltyInits(
            rows=ids("penalty_rows"),
            values=view("penalty_values").view(-1, 3),
            prompt_rows=ids("prompt_rows"),
            prompt_ids=ids("prompt_ids"),
            output_rows=ids("output_rows"),
            output_ids=ids("output_ids"),
        )
    if work.biases:
        biases = BiasInits(
            rows=ids("bias_rows"),
            fills=view("bias_fills"),
            entry_rows=ids("bias_entry_rows"),
            entry_ids=ids("bias_entry_ids"),
            entry_values=view("bias_entry_values"),
        )
    if work.words:
        words = WordInits(
            rows=ids("word_rows"),
            words=view("word_tokens").view(-1, MAX_WORDS, MAX_WORD_TOKENS),
            recent=view("word_recent").view(-1, NUM_RECENT),
        )
    return WideInits(penalties=penalties, biases=biases, words=words)


def wide_samples(work: WideWork, view: Callable[[str], Tensor]) -> WideSamples:
    """Which samples use which part, on the device; ``view`` gives the fields."""

    def which(name: str, samples: tuple[int, ...]) -> RowSamples | None:
        if not samples:
            return None
        return RowSamples(samples=view(f"{name}_samples").to(torch.int64), rows=view(f"{name}_rows").to(torch.int64))

    return WideSamples(
        penalised=which("penalised", work.penalised_samples),
        biased=which("biased", work.biased_samples),
        worded=which("worded", work.worded_samples),
    )


def _put_by_row(put: Callable[[str, ArrayLike], None], name: str, rows: Sequence[int], ids: Sequence[_Ids]) -> None:
    put(f"{name}_rows", np.repeat(np.array(rows, dtype=np.int32), [len(each) for each in ids]))
    put(f"{name}_ids", np.concatenate(ids))
