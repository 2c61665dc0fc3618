"""Token ids to text, one id at a time: three decoders that give out only text which nothing to come can change.

A tokenizer decodes a *list* of ids, and its text for a prefix of the list need not be a prefix of its text for the
whole: characters are split over tokens, and a first piece loses its leading space. Decoding each new list again from
its start would be right but costs more with every token. A :class:`StreamDecoder` keeps the little state that matters
instead:

- :class:`Utf8StreamDecoder`: every token is a string of bytes (byte-level BPE: GPT-2, Llama 3, Qwen).
- :class:`ByteFallbackStreamDecoder`: a token is text or one byte (sentencepiece with byte fallback: Llama 2, Gemma).
- :class:`WindowStreamDecoder`: anything else, by decoding a window of bounded length twice.

A decoder belongs to one request and is used by one thread at a time. The tables of pieces are shared and only grow.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "ByteFallbackStreamDecoder",
    "LeftStrip",
    "StreamDecoder",
    "Utf8StreamDecoder",
    "WindowStreamDecoder",
]

REPLACEMENT_CHARACTER = "\ufffd"


class StreamDecoder(Protocol):
    """Turns ids into text as they come.

    The joined texts of all :meth:`push` calls, followed by those of
    :meth:`rest`, are the tokenizer's decoding of all ids.
    """

    def push(self, token_id: int) -> list[str]:
        """Take the next id and return the texts that became final.

        The last text belongs to this id, the one before to the id before, and so on. The list is empty while this
        id's text is still open.
        """

    def rest(self) -> list[str]:
        """The texts that would follow if no further id came, the last of them for the last id. Changes nothing."""


class Utf8StreamDecoder:
    """Every token is a string of bytes; together they are UTF-8, in which each invalid part becomes one U+FFFD.

    At most three bytes are held back: those of a character that can still be completed.
    """

    def __init__(self, pieces: Mapping[int, bytes]) -> None:
        self._pieces = pieces
        self._codec = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> list[str]:
        return [self._codec.decode(self._pieces[token_id])]

    def rest(self) -> list[str]:
        open_bytes, _ = self._codec.getstate()
        return [open_bytes.decode("utf-8", errors="replace")] if open_bytes else []


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftStrip:
    """Up to ``count`` copies of ``character`` are cut off at the start of the whole text."""

    character: str
    count: int


class ByteFallbackStreamDecoder:
    """A token is either text or one byte; a run of bytes is UTF-8 as a whole, or becomes one U+FFFD for each byte.

    That rule of the sentencepiece decoders means that one bad byte turns the complete characters before it in the
    same run into U+FFFD as well. So a run is held back until a text token ends it, or until it cannot become valid
    any more, after which each of its bytes flows out as U+FFFD at once.
    """

    def __init__(self, pieces: Mapping[int, str | int | None], left_strip: LeftStrip | None) -> None:
        """Args:
        pieces: for each id its text, its byte (0 to 255), or ``None`` if it has no part in the text.
        left_strip: what is cut off at the start of the text.
        """
        self._pieces = pieces
        self._strip_left = left_strip.count if left_strip else 0
        self._strip_character = left_strip.character if left_strip else ""
        self._codec = codecs.getincrementaldecoder("utf-8")(errors="strict")
        self._run: list[str | None] = []  # held ids: the characters each byte completed; None: not a byte
        self._run_is_invalid = False

    def push(self, token_id: int) -> list[str]:
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            texts = [*self._closed_run(), piece]
            self._run.clear()
            self._run_is_invalid = False
            self._codec.reset()
            return self._stripped(texts)
        if piece is None:
            if not self._run:
                return [""]
            self._run.append(None)  # keeps its place among the ids of the run
            return []
        return self._stripped(self._push_byte(piece))

    def rest(self) -> list[str]:
        strip_left = self._strip_left
        texts = self._stripped(self._closed_run())
        self._strip_left = strip_left
        return texts

    def _push_byte(self, byte: int) -> list[str]:
        if self._run_is_invalid:
            return [REPLACEMENT_CHARACTER]
        try:
            self._run.append(self._codec.decode(bytes((byte,))))
        except UnicodeDecodeError:
            self._run.append("")
            texts = self._replaced_run()
            self._run.clear()
            self._run_is_invalid = True
            return texts
        return []

    def _closed_run(self) -> list[str]:
        """The texts of the ids held, if the run ended here."""
        open_bytes, _ = self._codec.getstate()
        if open_bytes and not self._run_is_invalid:
            return self._replaced_run()
        return [text or "" for text in self._run]

    def _replaced_run(self) -> list[str]:
        return ["" if text is None else REPLACEMENT_CHARACTER for text in self._run]

    def _stripped(self, texts: list[str]) -> list[str]:
        if not self._strip_left:
            return texts
        result = []
        for text in texts:
            cut = self._num_stripped(text)
            self._strip_left = self._strip_left - cut if cut == len(text) else 0
            result.append(text[cut:])
        return result

    def _num_stripped(self, text: str) -> int:
        cut = 0
        while cut < min(self._strip_left, len(text)) and text[cut] == self._strip_character:
            cut += 1
        return cut


class WindowStreamDecoder:
    """Any decoder in which a token's text depends on its neighbours only: decodes a window with and without new ids.

    The window starts with a few ids whose text is out already, so that what a decoder does to the start of a text
    falls on them. Text that ends in U+FFFD is held back while it can become a character, up to ``MAX_HELD_IDS`` ids.
    """

    CONTEXT_IDS = 8
    MAX_HELD_IDS = 16

    def __init__(self, decode: Callable[[Sequence[int]], str], is_hidden: Callable[[int], bool]) -> None:
        self._decode = decode
        self._is_hidden = is_hidden  # whether `decode` leaves an id out: it would make a context that shields nothing
        self._context: list[int] = []
        self._held: list[int] = []
        self._num_hidden_held = 0

    def push(self, token_id: int) -> list[str]:
        if self._is_hidden(token_id):
            self._num_hidden_held += bool(self._held)
            return [] if self._held else [""]
        self._held.append(token_id)
        texts = self.rest()
        if texts[-1].endswith(REPLACEMENT_CHARACTER) and len(self._held) < self.MAX_HELD_IDS:
            return []
        self._context = [*self._context, *self._held][-self.CONTEXT_IDS :]
        self._held.clear()
        self._num_hidden_held = 0
        return texts

    def rest(self) -> list[str]:
        if not self._held:
            return []
        known = self._decode(self._context) if self._context else ""
        text = self._decode([*self._context, *self._held])[len(known) :]
        return [*[""] * (len(self._held) + self._num_hidden_held - 1), text]
