"""What a request must give, computed alone in plain Python: :func:`solo`.

No blocks, batches, rows, streams or tensors: the whole sequence is hashed from its start for every token, and sampling
is written out in double precision. Where a draw falls so close to the border of two tokens that fp32 may see it on
the other side, :class:`AmbiguousDrawError` is raised, and the workload takes another seed.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from gapless.outputs import FinishReason
from gapless.sampling_params import SamplingParams
from simulation.hash_model import NOT_A_NUMBER, attend, embed, logits_row, logits_table

__all__ = ["AmbiguousDrawError", "SoloOutput", "draw", "solo", "uniform_number"]

_MARGIN = 1e-4
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class AmbiguousDrawError(Exception):
    """fp32 and double precision may disagree about a draw."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoloOutput:
    """Ids, and why they end there; text for requests that are judged by it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    text: str | None = None


def solo(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    max_tokens: int,
    stop_token_ids: frozenset[int] = frozenset(),
    bad_words: Sequence[Sequence[int]] = (),
    poison: int | None = None,
) -> SoloOutput:
    """Generate from ``prompt`` as if nothing else existed."""
    first: list[int] = []
    second: list[int] = []
    output: list[int] = []
    new = list(prompt)
    adjusts = bool(bad_words or params.logit_bias or params.allowed_token_ids) or (
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
    )
    while len(output) < max_tokens:
        for token in new:
            first.append(embed(token, len(first), poison))
            second.append(attend(first))
        state = attend(second)
        if state == NOT_A_NUMBER:
            return SoloOutput(token_ids=tuple(output), finish_reason="error")
        masked = stop_token_ids if len(output) < params.min_tokens else frozenset()
        logits = _rows()[logits_row(state)]
        if adjusts:
            logits = _adjusted(logits, params, bad_words, prompt, output)
        token = _choose(logits, params, len(output), masked)
        output.append(token)
        if token in stop_token_ids:
            reason = token if token in params.stop_token_ids else None
            return SoloOutput(token_ids=tuple(output), finish_reason="stop", stop_reason=reason)
        new = [token]
    return SoloOutput(token_ids=tuple(output), finish_reason="length")


def draw(logits: Sequence[float], params: SamplingParams, number: float) -> int:
    """Sample from ``logits`` (-inf for masked ones) with a uniform number, in double precision.

    Raises:
        AmbiguousDrawError: the number, or a filter, is within the margin of a border.
    """
    top = max(logits)
    weights = [math.exp((value - top) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept: list[int] = []
    before = 0.0
    for token in order:
        share = weights[token] / total
        _check_margin(before, params.top_p)
        _check_margin(share, params.min_p * weights[order[0]] / total)
        if kept and (before >= params.top_p < 1 or share < params.min_p * weights[order[0]] / total):
            break
        kept.append(token)
        before += share
    target = number * sum(weights[token] for token in kept)
    passed = 0.0
    for token in sorted(kept):
        passed += weights[token]
        if abs(passed - target) < _MARGIN * total:
            raise AmbiguousDrawError
        if passed > target:
            return token
    raise AssertionError("the uniform number is not below 1")


def uniform_number(seed: int, position: int) -> float:
    """SplitMix64's finaliser over seed and position, as a number in [0, 1)."""
    state = (_mix((seed + _GAMMA) & _MASK) + (position + 1) * _GAMMA) & _MASK
    return (_mix(state) >> 11) * 2.0**-53


def _adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]],
    prompt: Sequence[int],
    output: Sequence[int],
) -> list[float]:
    """Biases, then penalties, then bad words, from the history as it is."""
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids
    history = [*prompt, *output]
    seen, counts = set(history), Counter(output)
    adjusted = []
    for token, logit in enumerate(logits):
        value = logit + bias.get(token, 0.0)
        if token in seen:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = counts[token]
        value -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        adjusted.append(value if allowed is None or token in allowed else -math.inf)
    for word in bad_words:
        if len(word) == 1 or history[1 - len(word) :] == list(word[:-1]):
            adjusted[word[-1]] = -math.inf
    return adjusted


def _choose(logits: Sequence[float], params: SamplingParams, position: int, masked: frozenset[int]) -> int:
    if masked:
        logits = [-math.inf if token in masked else value for token, value in enumerate(logits)]
    if max(logits) == -math.inf:
        raise AmbiguousDrawError  # nothing is left to sample: not what a workload is about
    if params.greedy:
        second, first = sorted(logits)[-2:]
        if first - second < _MARGIN:
            raise AmbiguousDrawError
        return max(range(len(logits)), key=logits.__getitem__)
    assert params.seed is not None
    return draw(logits, params, uniform_number(params.seed, position))


def _check_margin(value: float, border: float) -> None:
    if 0 < border < 1 and abs(value - border) < _MARGIN * border:
        raise AmbiguousDrawError


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@lru_cache(maxsize=1)
def _rows() -> list[list[float]]:
    rows: list[list[float]] = logits_table().tolist()
    return rows
