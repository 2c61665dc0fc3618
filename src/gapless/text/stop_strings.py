"""Stop strings: :class:`StopStringCheck` ends a request's text before the first of them.

*Which match wins.* The one that starts first in the text; of two that start together, the shorter. That is a rule
about the text alone, so the outcome is the same however text is split into tokens and tokens into updates. Where one
stop string lies inside another (``"b"`` and ``"abc"``), a match of the inner one is decided when the outer one can no
longer come, and what was sampled meanwhile is dropped.

*What is held back.* Text that may still become part of a match. The ids end with the token that completes the match,
so the ids that are given out are those which no match can cut off any more.

*Special tokens.* With ``skip_special_tokens`` they have no part in the text, yet ``"<|im_end|>"`` has to stop. Stop
strings that hold the text of a special token are therefore searched for in the text with special tokens as well. The
text of the request then ends where the match begins, in the text that the caller sees.

One detokenizer runs for each request with stop strings (two in the case above), and each character of its text costs
one step of an automaton for each string. A check belongs to one request; the engine's thread uses it.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from gapless.engine.stop_check import StopMatch
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.detokenizer import IncrementalDetokenizer

__all__ = ["StopStringCheck"]


class StopStringCheck:
    """Finds where the output of one request ends, and makes its text; see :class:`gapless.engine.stop_check.StopCheck`.

    Args:
        tokenizer: whose ids they are.
        stops: at least one string, none of them empty.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: end the text after the match instead of before it.
        min_tokens: matches that are completed before this many tokens do not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        skip_special_tokens: bool,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._include_stop = include_stop
        self._visible = _Channel(
            IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens), stops, min_tokens
        )
        hidden = [stop for stop in stops if skip_special_tokens and tokenizer.holds_special_text(stop)]
        self._full = (
            _Channel(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), hidden, min_tokens)
            if hidden
            else None
        )
        self._held = ""  # visible text that is not given out
        self._num_released = 0
        self._ready: list[str] = []
        self._match: StopMatch | None = None
        self._ended = False

    @property
    def num_settled_ids(self) -> int:
        """How many of the first ids no match can cut off."""
        if self._match is not None:
            return self._match.num_ids
        if self._ended:
            return self._visible.detokenizer.num_ids
        settled = self._visible.num_settled_ids
        return settled if self._full is None else min(settled, self._full.num_settled_ids)

    def append(self, token_id: int) -> StopMatch | None:
        """Take the next id; return the match if one is decided."""
        assert not self._ended, "append after the end"
        self._held += self._visible.append(token_id)
        if self._full is not None:
            self._full.append(token_id)
        self._judge()
        return self._match

    def end(self) -> StopMatch | None:
        """End the output: held text becomes final, and a match in it counts."""
        if not self._ended:
            self._ended = True
            self._held += self._visible.finish()
            if self._full is not None:
                self._full.finish()
            self._judge()
        return self._match

    def take_text(self) -> str:
        """Return the text that became final since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _judge(self) -> None:
        """Decide for a match if no earlier one can come, and give out the text that none can touch."""
        best = self._visible.found
        limit = self._visible.search.open_start
        if self._full is not None:
            other = self._full.found
            if other is not None:
                other = other._replace(start=self._visible_position(other.start))
                best = other if best is None or other[:2] < best[:2] else best
            limit = min(limit, self._visible_position(self._full.search.open_start))
        if self._ended:
            limit = self._num_released + len(self._held)
        self._release(limit if best is None else min(limit, best.start))
        if best is not None and best.start <= limit and (self._ended or best.channel.is_decided):
            self._decide(best)

    def _decide(self, found: "_Found") -> None:
        if found.channel is self._full and not self._ended:
            # Bytes of an unfinished character before a special token that stops: they end as the tokenizer decodes.
            self._held += self._visible.detokenizer.finish()
            self._release(self._visible_position(self._full.search.start))
        self._ended = True
        self._held = ""
        self._match = StopMatch(found.stop, found.num_ids)
        if self._include_stop:
            self._ready.append(found.stop)

    def _release(self, end: int) -> None:
        """Give out the visible text up to the position ``end``."""
        count = end - self._num_released
        if count > 0:
            self._ready.append(self._held[:count])
            self._held = self._held[count:]
            self._num_released = end

    def _visible_position(self, position: int) -> int:
        """Where a position of the text with special tokens lies in the text without them."""
        assert self._full is not None
        full, visible = self._full.detokenizer, self._visible.detokenizer
        before = full.num_ids_within(position)
        start = visible.num_characters_of(before)
        inside = position - full.num_characters_of(before)
        return start + min(inside, visible.num_characters_of(before + 1) - start)


class _Found(NamedTuple):
    """A match, and where in which text it was found; the lesser (start, num_ids) wins."""

    start: int
    num_ids: int
    stop: str
    channel: "_Channel"


class _Channel:
    """A text and the search in it."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self.detokenizer = detokenizer
        self.search = _Search(stops, lambda end: detokenizer.num_ids_for(end) >= min_tokens)

    @property
    def found(self) -> _Found | None:
        """The first match so far; an earlier one may come while the search has an earlier open start."""
        if self.search.stop is None:
            return None
        return _Found(self.search.start, self.detokenizer.num_ids_for(self.search.end), self.search.stop, self)

    @property
    def is_decided(self) -> bool:
        """Whether no match can come that starts before the one that was found."""
        return self.search.start <= self.search.open_start

    @property
    def num_settled_ids(self) -> int:
        """Ids whose text is known; those up to a match that is not decided, but for the one that completes it."""
        if self.search.stop is None:
            return self.detokenizer.num_final_ids
        return self.detokenizer.num_ids_for(self.search.end) - 1

    def append(self, token_id: int) -> str:
        delta = self.detokenizer.append((token_id,))
        if delta:
            self.search.feed(delta)
        return delta

    def finish(self) -> str:
        delta = self.detokenizer.finish()
        self.search.feed(delta)
        return delta


class _Search:
    """Finds the first of several strings in a text that comes in pieces, and knows which end of it may still match.

    One automaton for each string (Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6(2),
    1977). Its state is the length of the longest end of the text that begins the string.
    """

    def __init__(self, stops: Sequence[str], counts: Callable[[int], bool]) -> None:
        """Args:
        stops: what to find.
        counts: whether a match that ends at a position is one.
        """
        self.stop: str | None = None
        self.start = 0
        self.end = 0
        self._counts = counts
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)
        self._length = 0

    @property
    def open_start(self) -> int:
        """Where the first string that may still come would start; never moves back."""
        return self._length - max(self._states)

    def feed(self, text: str) -> None:
        """Take the next piece of the text."""
        if self._firsts.isdisjoint(text) and not any(self._states):
            self._length += len(text)
            return
        states = self._states
        for character in text:
            self._length += 1
            for index, stop in enumerate(self._stops):
                state, borders = states[index], self._borders[index]
                while state and stop[state] != character:
                    state = borders[state - 1]
                if stop[state] == character:
                    state += 1
                if state == len(stop):
                    self._met(stop)
                    state = borders[state - 1]
                states[index] = state

    def _met(self, stop: str) -> None:
        start = self._length - len(stop)
        if (self.stop is None or start < self.start) and self._counts(self._length):
            self.stop, self.start, self.end = stop, start, self._length


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in stop[1:]:
        state = borders[-1]
        while state and stop[state] != character:
            state = borders[state - 1]
        borders.append(state + (stop[state] == character))
    return tuple(borders)
