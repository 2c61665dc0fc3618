"""What ends a request besides its tokens: :class:`StopCheck`, a judge that is handed in from above.

The engine knows ids; whether a stop string has come is a question of text, which it never imports. A request that has
stop strings brings a judge, the engine shows it every token, and the verdict holds everywhere: ids, text, usage and
prefix cache end where the judge says. Requests without one pay nothing. Engine thread only.
"""

from typing import NamedTuple, Protocol

__all__ = ["StopCheck", "StopMatch"]


class StopMatch(NamedTuple):
    """Where a request ends: with its ``num_ids``-th output token, because of the string ``stop``."""

    stop: str
    num_ids: int


class StopCheck(Protocol):
    """Judges one request's output and makes its text. A verdict depends on the ids alone, not on when they come."""

    @property
    def num_settled_ids(self) -> int:
        """How many of the first ids belong to the output whatever comes; only these are published and cached."""
        ...

    def append(self, token_id: int) -> StopMatch | None:
        """Take the next output token, and say where the output ends if that is known now.

        It may lie before this token: some text is known late.
        """
        ...

    def end(self) -> StopMatch | None:
        """No further token will come. Return where the output ends if a stop is found in it; a second call repeats."""
        ...

    def take_text(self) -> str:
        """Return the text that became final since the last call. After :meth:`end` nothing is missing."""
        ...
