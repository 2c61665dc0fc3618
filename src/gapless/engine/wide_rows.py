"""Requests that need a wide row of the sampler: what they bring (:class:`WideOptions`) and who holds one.

A request with penalties, biases or bad words takes a wide row with its row and gives it back with it. What it brings
when it enters, and again after a preemption, goes with the step, so :class:`WideRows` also minds how much of that fits
into one step. Engine thread only, except that options are made in the caller's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gapless.pipeline.wide_rows import BiasInit, PenaltyInit, WideBuilder, WideLimits, WordInit
from gapless.sampling.bad_words import ANY_TOKEN, MAX_WORD_TOKENS, MAX_WORDS, NO_TOKEN, NUM_RECENT
from gapless.sampling_params import SamplingParams

__all__ = ["KnownTokens", "WideOptions", "WideRows"]

_Ids = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTokens:
    """A request's prompt and the output that the host has seen, int32."""

    prompt: _Ids
    output: Sequence[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WideOptions:
    """The part of a request's sampling parameters that needs a wide row.

    Attributes:
        penalties: repetition, frequency, presence; or ``None``.
        bias_fill: what tokens get that are not in ``bias_ids``.
        bias_ids, bias_values: ``[n]``, int32 and fp32; ``None`` for no bias.
        words: ``[MAX_WORDS * MAX_WORD_TOKENS]``, int32: the bad words of several tokens; ``None`` for none.
    """

    penalties: tuple[float, float, float] | None
    bias_fill: float
    bias_ids: _Ids | None
    bias_values: NDArray[np.float32] | None
    words: _Ids | None

    @staticmethod
    def of(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> "WideOptions | None":
        """What ``params`` need, or ``None``; ``bad_words`` are those of ``params`` as token ids."""
        penalties = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        bias = dict(params.logit_bias or {})
        if params.allowed_token_ids is not None:
            bias = {token: bias.get(token, 0.0) for token in params.allowed_token_ids}
        bias.update({word[0]: -np.inf for word in bad_words if len(word) == 1})
        longer = [word for word in bad_words if len(word) > 1]
        penalised, biased = penalties != (1, 0, 0), bool(bias) or params.allowed_token_ids is not None
        if not (penalised or biased or longer):
            return None
        return WideOptions(
            penalties=penalties if penalised else None,
            bias_fill=0.0 if params.allowed_token_ids is None else -np.inf,
            bias_ids=np.fromiter(bias.keys(), np.int32, len(bias)) if biased else None,
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)) if biased else None,
            words=_packed_words(longer) if longer else None,
        )


class WideRows:
    """Free wide rows, and the room for what enters in one step."""

    def __init__(self, limits: WideLimits) -> None:
        self._limits = limits
        self._free = list(range(limits.max_rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Wide rows that nobody holds."""
        return len(self._free)

    def fits(self, options: WideOptions, num_known: int, builder: WideBuilder) -> bool:
        """Whether a request with ``num_known`` tokens can enter in the step that is being built."""
        if not self._free:
            return False
        limits = self._limits
        if options.penalties is not None and builder.num_history + num_known > limits.max_history:
            return False
        if options.bias_ids is not None and builder.num_biases + len(options.bias_ids) > limits.max_biases:
            return False
        return options.words is None or len(builder.words) < limits.max_word_inits

    def enter(self, options: WideOptions, known: KnownTokens, builder: WideBuilder) -> int:
        """Take a wide row, and send what the request brings with the step."""
        row = self._free.pop()
        if options.penalties is not None:
            repetition, frequency, presence = options.penalties
            builder.num_history += len(known.prompt) + len(known.output)
            builder.penalties.append(
                PenaltyInit(
                    row=row,
                    repetition=repetition,
                    frequency=frequency,
                    presence=presence,
                    prompt=known.prompt,
                    output=np.array(known.output, dtype=np.int32),
                )
            )
        if options.bias_ids is not None and options.bias_values is not None:
            builder.num_biases += len(options.bias_ids)
            builder.biases.append(
                BiasInit(row=row, fill=options.bias_fill, ids=options.bias_ids, values=options.bias_values)
            )
        if options.words is not None:
            builder.words.append(WordInit(row=row, words=options.words, recent=_recent(known)))
        return row

    def leave(self, row: int) -> None:
        """Give a wide row back: later steps run after those that use it."""
        self._free.append(row)

    def sample(self, options: WideOptions, row: int, sample: int, builder: WideBuilder) -> None:
        """The holder of ``row`` is sample ``sample`` of the step."""
        if options.penalties is not None:
            builder.penalised_samples.append(sample)
            builder.penalised_rows.append(row)
        if options.bias_ids is not None:
            builder.biased_samples.append(sample)
            builder.biased_rows.append(row)
        if options.words is not None:
            builder.worded_samples.append(sample)
            builder.worded_rows.append(row)


def _packed_words(words: Sequence[Sequence[int]]) -> _Ids:
    packed = np.full((MAX_WORDS, MAX_WORD_TOKENS), NO_TOKEN, dtype=np.int32)
    for place, word in enumerate(words):
        packed[place, : -len(word)] = ANY_TOKEN
        packed[place, -len(word) :] = word
    return packed.reshape(-1)


def _recent(known: KnownTokens) -> _Ids:
    recent = np.full(NUM_RECENT, NO_TOKEN, dtype=np.int32)
    output = np.array(known.output[-NUM_RECENT:], dtype=np.int32)
    tail = np.concatenate([known.prompt[-NUM_RECENT:], output])[-NUM_RECENT:]
    recent[NUM_RECENT - len(tail) :] = tail
    return recent
