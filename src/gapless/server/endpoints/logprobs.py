"""Log-probs in the three forms of the OpenAI API. Numbers are those of the raw logits, and always finite.

Pure functions, but for :class:`OffsetCounter`, which belongs to one choice.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gapless.outputs import Logprob, TokenLogprobsById
from gapless.text.detokenizer import IncrementalDetokenizer
from gapless.text.tokenizer import Tokenizer

__all__ = [
    "FLOOR",
    "OffsetCounter",
    "chat_logprobs",
    "completion_logprobs",
    "joined_completion_logprobs",
    "prompt_logprobs_by_id",
]

FLOOR: Final = -9999.0
"""Stands for an impossible token: JSON has no infinity."""


def chat_logprobs(
    token_ids: Sequence[int], places: Sequence[TokenLogprobsById], tokenizer: Tokenizer, *, num_top: int
) -> list[dict[str, Any]]:
    """Entries of ``logprobs.content``, one for each sampled token."""
    return [
        {
            **_chat_token(token, place[token], tokenizer),
            "top_logprobs": [_chat_token(other, rated, tokenizer) for other, rated in _top(place, num_top)],
        }
        for token, place in zip(token_ids, places, strict=True)
    ]


class OffsetCounter:
    """Where in the text each token starts, for one choice.

    Args:
        tokenizer: of the model.
        skip_special_tokens: as the text was made.
        start: where the first token starts.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._next = start

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens. A token in the middle of a character starts where the character does."""
        offsets = []
        for token in token_ids:
            offsets.append(self._next)
            self._next += len(self._detokenizer.append((token,)))
        return offsets


def completion_logprobs(
    token_ids: Sequence[int],
    places: Sequence[TokenLogprobsById | None],
    tokenizer: Tokenizer,
    *,
    num_top: int,
    offsets: Sequence[int],
) -> dict[str, list[Any]]:
    """The four lists of a completion; a place without log-probs (the first of a prompt) has ``null``.

    The most likely tokens always hold the one that stands there. A token that is no text by itself is named by its
    bytes (``bytes:\\xf0\\x9f``), one without any by its id (``token_id:300``): names are keys, and must differ.
    """
    tops: list[dict[str, float] | None] = []
    for token, place in zip(token_ids, places, strict=True):
        if place is None:
            tops.append(None)
            continue
        rated = [*_top(place, num_top), (token, place[token])]
        tops.append({_name(each, tokenizer): _finite(logprob.logprob) for each, logprob in rated})
    return {
        "text_offset": list(offsets),
        "token_logprobs": [
            None if place is None else _finite(place[token].logprob)
            for token, place in zip(token_ids, places, strict=True)
        ],
        "tokens": [_name(token, tokenizer) for token in token_ids],
        "top_logprobs": tops,
    }


def joined_completion_logprobs(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several of :func:`completion_logprobs` behind each other."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def prompt_logprobs_by_id(places: Sequence[TokenLogprobsById | None]) -> list[dict[str, dict[str, Any]] | None]:
    """``prompt_logprobs`` as vLLM writes them."""
    return [
        None
        if place is None
        else {
            str(token): {
                "logprob": _finite(rated.logprob),
                "rank": rated.rank,
                "decoded_token": rated.decoded_token,
            }
            for token, rated in place.items()
        }
        for place in places
    ]


def _top(place: TokenLogprobsById, num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens of a place, best first; a sampled token that is none of them is left out."""
    if not num_top:
        return []
    ranked = [(token, rated) for token, rated in place.items() if rated.rank is not None and rated.rank <= num_top]
    ranked.sort(key=lambda each: each[1].rank or 0)
    return ranked[:num_top]


def _chat_token(token: int, rated: Logprob, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {
        "token": data.decode(errors="replace"),
        "logprob": _finite(rated.logprob),
        "bytes": list(data),
    }


def _name(token: int, tokenizer: Tokenizer) -> str:
    data = tokenizer.token_bytes(token)
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)  # not a number never comes this far: the engine ends such a request
