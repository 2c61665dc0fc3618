"""Checks of what a caller hands in as text or token ids. Pure functions: any thread may call them.

Each raises :class:`~gapless.errors.RequestError` in the caller, before anything is queued, naming the field (and the
index in a list), the value and the limit.
"""

from collections.abc import Sequence
from numbers import Integral

from gapless.errors import RequestError, shown
from gapless.sampling_params import are_token_ids

__all__ = ["check_text", "check_token_ids"]


def check_text(value: object, *, field: str) -> str:
    """Return ``value`` if it is a string that can be encoded as UTF-8.

    Args:
        value: what the caller gave.
        field: its name in messages, with an index where it is one of a list (``"prompts[3]"``).

    Raises:
        RequestError: if it is not a string, or holds half of a surrogate pair, which no tokenizer can encode (JSON
            can: a string cut in the middle of an emoji's escape).
    """
    if not isinstance(value, str):
        raise RequestError(f"{field}={shown(value)} must be a string, not {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = ord(value[error.start])
        raise RequestError(
            f"{field} holds a lone surrogate U+{lone:04X} at character {error.start}, which is not valid text; "
            "send the whole character"
        ) from None
    return value


def check_token_ids(ids: object, vocab_size: int, field: str = "prompt_token_ids") -> list[int]:
    """Return ``ids`` as a list of plain integers, each in ``[0, vocab_size)``.

    Args:
        ids: a sequence of integers (integer types of numpy are taken; booleans and floats are not).
        vocab_size: rows of the model's embedding, which may be more or fewer than the tokenizer's ids.
        field: the sequence's name in messages.

    Raises:
        RequestError: naming field, index and value; also for an empty sequence, from which nothing can be generated.
    """
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Sequence):
        raise RequestError(f"{field}={shown(ids)} must be a list of token ids, not {type(ids).__name__}")
    if not ids:
        raise RequestError(f"{field} is empty; give at least one token id")
    if are_token_ids(ids, vocab_size):
        return list(ids)
    # An id is wrong, which is to be named, or is of an integer type of its own.
    numbers = []
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{field}[{index}]={shown(token)} must be an integer, not {type(token).__name__}")
        number = int(token)
        if not 0 <= number < vocab_size:
            raise RequestError(f"{field}[{index}]={number} is not in the vocabulary; ids go from 0 to {vocab_size - 1}")
        numbers.append(number)
    return numbers
