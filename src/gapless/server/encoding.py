"""Messages to bytes and back: one MessagePack map or array each, decoded into its exact type or refused.

Token ids, choice ids and log-probs travel as packed arrays in this host's byte order: both processes run on it. Errors
cross as a kind and a message and are the same error on the other side. Pure functions: any thread may call them.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from gapless.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    GaplessError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    UnsupportedModelError,
)
from gapless.server.messages import Command, Failed, FailureKind, News, RefusalKind, Refused

__all__ = [
    "MAX_COMMAND_BYTES",
    "MAX_NEWS_BYTES",
    "NEWS_HIGH_WATER_MARK",
    "MalformedMessageError",
    "decode_command",
    "decode_news",
    "encode",
    "failure",
    "failure_of",
    "packed_choice_ids",
    "packed_floats",
    "packed_ids",
    "refusal",
    "refusal_of",
    "unpacked_choice_ids",
    "unpacked_floats",
    "unpacked_ids",
]

MAX_COMMAND_BYTES = 64 << 20
"""Largest message to the engine. A prompt token takes four bytes."""
MAX_NEWS_BYTES = 256 << 20
"""Largest message from the engine; news of a step that would be larger are sent in parts."""
NEWS_HIGH_WATER_MARK = 64
"""Messages that wait at each end of the news' socket before the engine's news are merged instead."""

# The most special ones first: the first that fits is taken.
_FAILURES: dict[FailureKind, type[GaplessError]] = {
    "config": ConfigError,
    "unsupported": UnsupportedModelError,
    "checkpoint": CheckpointError,
}
_REFUSALS: dict[RefusalKind, type[GaplessError]] = {
    "too_long": PromptTooLongError,
    "queue_full": QueueFullError,
    "request": RequestError,
    "dead": EngineDeadError,
}

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_news = msgspec.msgpack.Decoder(News)


class MalformedMessageError(Exception):
    """Bytes that are no message. Says how they fail, never what they hold."""


def encode(message: Command | News) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Read a command.

    Raises:
        MalformedMessageError: it is none.
    """
    try:
        return _commands.decode(data)
    except (msgspec.MsgspecError, RequestError, RecursionError) as error:
        raise _malformed(data, error) from None


def decode_news(data: bytes) -> News:
    """Read news.

    Raises:
        MalformedMessageError: they are none.
    """
    try:
        return _news.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise _malformed(data, error) from None


def packed_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 in this host's byte order: both processes run on it."""
    return array("i", ids).tobytes()


def unpacked_ids(data: bytes) -> list[int]:
    """The ids again.

    Raises:
        MalformedMessageError: it is no whole number of ids.
    """
    return _unpacked("i", data)


def packed_choice_ids(ids: Sequence[int]) -> bytes:
    """Choice ids as int64."""
    return array("q", ids).tobytes()


def unpacked_choice_ids(data: bytes) -> list[int]:
    """The ids again; raises as :func:`unpacked_ids`."""
    return _unpacked("q", data)


def packed_floats(values: Sequence[float]) -> bytes:
    """Log-probs as fp32, which is how the engine makes them."""
    return array("f", values).tobytes()


def unpacked_floats(data: bytes) -> list[float]:
    """The values again; raises as :func:`unpacked_ids`."""
    return _unpacked("f", data)


def failure_of(error: Exception) -> Failed:
    """What to tell of an error that ended the start."""
    for kind, type_ in _FAILURES.items():
        if isinstance(error, type_):
            return Failed(kind=kind, message=str(error))
    return Failed(kind="other", message=f"{type(error).__name__}: {error}")


def failure(news: Failed) -> GaplessError:
    """The error again."""
    if news.kind == "other":
        return EngineDeadError(f"the engine could not be started: {news.message}")
    return _FAILURES[news.kind](news.message)


def refusal_of(call: int, error: RequestError | EngineDeadError) -> Refused:
    """What to tell of a request that was refused."""
    kind = next(kind for kind, type_ in _REFUSALS.items() if isinstance(error, type_))
    return Refused(call=call, kind=kind, message=str(error))


def refusal(news: Refused) -> GaplessError:
    """The error again."""
    return _REFUSALS[news.kind](news.message)


def _unpacked(code: Literal["i", "q", "f"], data: bytes) -> list[Any]:
    values = array(code)
    if len(data) % values.itemsize:
        raise MalformedMessageError(f"a packed array of {len(data)} bytes is no whole number of items")
    values.frombytes(data)
    return values.tolist()


def _malformed(data: bytes, error: Exception) -> MalformedMessageError:
    # The error's own words may quote what was sent.
    return MalformedMessageError(f"{len(data)} bytes that are no message ({type(error).__name__})")
