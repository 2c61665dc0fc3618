"""Every error gapless raises on purpose, as one tree.

::

    GaplessError
    ├── ConfigError (ValueError)            an option, or a pair of options, that cannot work
    ├── CheckpointError (ValueError)        a model folder or file that is missing, damaged or untrustworthy
    │   └── UnsupportedModelError           a model or feature that gapless does not have, by name
    ├── RequestError (ValueError)           a request refused in the caller, before anything is queued
    │   ├── PromptTooLongError              it can never fit into the context or the KV cache
    │   └── QueueFullError                  refused for load: try again later
    ├── RequestFailedError (RuntimeError)   an accepted request that ended in an error of its own
    └── EngineDeadError (RuntimeError)      the engine loop ended; the cause is chained
        └── StepTimeoutError                a step did not come back in time

A message names the value, the limit and the remedy. ``assert`` is for invariants only.
"""

import itertools
from collections.abc import Iterator

__all__ = [
    "CheckpointError",
    "ConfigError",
    "EngineDeadError",
    "GaplessError",
    "PromptTooLongError",
    "QueueFullError",
    "RequestError",
    "RequestFailedError",
    "StepTimeoutError",
    "UnsupportedModelError",
    "shown",
]

_SHOWN_CHARACTERS = 80


class GaplessError(Exception):
    """Base class of every error raised on purpose."""


class ConfigError(GaplessError, ValueError):
    """An option, or a combination of options, that cannot work."""


class CheckpointError(GaplessError, ValueError):
    """A checkpoint that is missing, damaged or not to be trusted."""


class UnsupportedModelError(CheckpointError):
    """A model architecture or feature that gapless does not implement."""


class RequestError(GaplessError, ValueError):
    """A request that is refused in the caller before anything is queued."""


class PromptTooLongError(RequestError):
    """A request that can never fit into the context length or the KV cache."""


class QueueFullError(RequestError):
    """A request refused because too many are waiting already."""


class RequestFailedError(GaplessError, RuntimeError):
    """An accepted request that ended in an error of its own, such as non-finite logits."""


class EngineDeadError(GaplessError, RuntimeError):
    """The engine loop has ended; ``__cause__`` is the error that ended it."""


class StepTimeoutError(EngineDeadError):
    """A step did not come back from the device within the watchdog's time."""


def shown(value: object) -> str:
    """``repr(value)`` for a message: short, and safe for whatever a caller hands in."""
    try:
        text = repr(_beginning(value, itertools.repeat(None, _SHOWN_CHARACTERS)))
    except ValueError:  # Python refuses to write out integers of thousands of digits
        return f"an integer of {int(value).bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def _beginning(value: object, budget: Iterator[None]) -> object:
    """As much of a value as can be seen of it: a client's may be megabytes, and writing them out takes seconds.

    Each item takes one of the budget, as it takes a character at least; what comes when it is spent is left out.
    """
    if isinstance(value, str | bytes):
        return value[: _SHOWN_CHARACTERS + 1] if len(value) > _SHOWN_CHARACTERS else value
    if type(value) is list:
        return [_beginning(item, budget) for item, _ in zip(value, budget, strict=False)]
    if type(value) is tuple:
        return tuple(_beginning(item, budget) for item, _ in zip(value, budget, strict=False))
    if type(value) is dict:
        return {key: _beginning(item, budget) for (key, item), _ in zip(value.items(), budget, strict=False)}
    return value
