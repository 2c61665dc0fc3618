"""Log-probs that a request must be given, whatever happened to it on the way: :func:`check_logprobs`."""

from collections.abc import Sequence
from functools import lru_cache

from gapless.engine.logprobs import TokenLogprobs
from gapless.engine.results import RequestUpdate
from gapless.sampling_params import SamplingParams
from simulation.audit import check
from simulation.hash_model import NOT_A_NUMBER, attend, embed, logits_row, logits_table

__all__ = ["check_logprobs"]

_TOLERANCE = 1e-4


def check_logprobs(
    prompt: Sequence[int],
    params: SamplingParams,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] | None,
    end: RequestUpdate,
    *,
    poison: int | None,
) -> None:
    """Check one choice: ``logprobs`` are those of its ``ids``, published with them."""
    who = f"request {end.request_id}"
    if params.logprobs is None:
        check(not logprobs, f"{who} did not ask for log-probs")
    else:
        check(logprobs is not None and len(logprobs) == len(ids), f"{who} has {logprobs} for {len(ids)} tokens")
        _check_row(who, _rows(prompt, ids, poison)[len(prompt) - 1 :], ids, logprobs or (), params.logprobs)
    rated = end.prompt_logprobs
    if params.prompt_logprobs is None:
        check(rated is None, f"{who} did not ask for its prompt's log-probs")
    elif rated is None:
        check(end.finish_reason in ("abort", "error"), f"{who} lacks its prompt's log-probs")
    else:
        check(len(rated) == len(prompt) and rated[0] is None, f"{who} has {len(rated)} for {len(prompt)} prompt tokens")
        after = [each for each in rated if each is not None]
        _check_row(who, _rows(prompt, (), poison), prompt[1:], after, params.prompt_logprobs)


def _check_row(
    who: str, rows: Sequence[int], tokens: Sequence[int], rated: Sequence[TokenLogprobs], number: int
) -> None:
    for place, (row, token, each) in enumerate(zip(rows, tokens, rated, strict=False)):
        right = _log_softmax()[row]
        top = sorted(range(len(right)), key=lambda other: -right[other])[:number]
        given = [each.logprob, *each.top_logprobs]
        expected = [right[token], *(right[other] for other in top)]
        near = all(abs(a - b) < _TOLERANCE for a, b in zip(given, expected, strict=True))
        rank = sum(value > right[token] for value in right) + 1
        check(near and each.top_ids == top and each.rank == rank, f"{who} has {each} at {place}; {expected} is right")


def _rows(prompt: Sequence[int], ids: Sequence[int], poison: int | None) -> list[int]:
    """Which row of logits follows each token."""
    first: list[int] = []
    second: list[int] = []
    rows: list[int] = []
    for token in (*prompt, *ids):
        first.append(embed(token, len(first), poison))
        second.append(attend(first))
        state = attend(second)
        rows.append(logits_row(state) if state != NOT_A_NUMBER else -1)
    return rows


@lru_cache(maxsize=1)
def _log_softmax() -> list[list[float]]:
    rows: list[list[float]] = logits_table().double().log_softmax(-1).tolist()
    return rows
