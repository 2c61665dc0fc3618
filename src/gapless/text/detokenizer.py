"""The text of a growing list of output ids, handed out in deltas: :class:`IncrementalDetokenizer`.

The promise, for every tokenizer and however ids are grouped into updates::

    "".join(deltas) + finish()  ==  tokenizer.decode(output_ids, skip_special_tokens=...)

Text is final once given out, so whoever searches it (stop strings) never has to look back. A delta holds U+FFFD only
if the whole text does. The cost of a token does not depend on how many came before it.

*Which rule completions follow.* The output ids are decoded **alone**. A sentencepiece tokenizer therefore drops the
leading space of the first output piece, as ``tokenizer.decode(output_ids)`` does. With ``prompt_ids`` the other rule
applies, *continuation*: ``decode(prompt + output)[len(decode(prompt)):]``, which keeps that space.

*What is held back.* The bytes of an unfinished character and, for byte-fallback tokenizers, a run of byte tokens until
its end, since one bad byte turns the whole run into U+FFFD (see :mod:`gapless.text.stream_decoder`). Text can thus
come out with a later id than the one that completed it; :meth:`IncrementalDetokenizer.num_ids_for` tells which one did.

An object belongs to one request and is used by one thread at a time.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from gapless.text.base_tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Turns the output ids of one request into text as they come.

    Args:
        tokenizer: whose ids they are.
        skip_special_tokens: leave special tokens out of the text.
        prompt_ids: ``None`` to decode the output alone; the prompt's ids to continue its text instead.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] | None = None
    ) -> None:
        self._decoder = tokenizer.stream_decoder(skip_special_tokens=skip_special_tokens)
        self._parts: list[str] = []
        self._ends: list[int] = []  # for each id whose text is final: the length of the text up to and with it
        self._num_ids = 0
        self._finished = False
        self._num_prompt_characters = 0  # open at the end of the prompt's text: they are not output
        if prompt_ids is not None:
            for token_id in prompt_ids:
                self._decoder.push(token_id)
            self._num_prompt_characters = sum(map(len, self._decoder.rest()))

    @property
    def text(self) -> str:
        """All text given out so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    @property
    def num_ids(self) -> int:
        """How many ids were appended."""
        return self._num_ids

    @property
    def num_final_ids(self) -> int:
        """How many ids, from the first, have all their text given out."""
        return len(self._ends)

    def append(self, ids: Sequence[int]) -> str:
        """Take the next output ids, any number of them, and return the text that became final (often empty)."""
        assert not self._finished, "append after finish"
        delta = ""
        for token_id in ids:
            self._num_ids += 1
            delta += self._accept(self._decoder.push(token_id))
        return delta

    def finish(self) -> str:
        """End the output and return the text that was held back; what could not be completed becomes U+FFFD."""
        assert not self._finished, "finish called twice"
        self._finished = True
        texts = self._decoder.rest()
        if len(self._ends) < self._num_ids:
            return self._accept(texts)
        # Bytes of an unfinished character: every id has its place already, so they go to the last one.
        text = self._without_prompt("".join(texts))
        if text:
            self._ends[-1] += len(text)
            self._parts.append(text)
        return text

    def num_ids_for(self, num_characters: int) -> int:
        """The number of output ids, from the first, that it took to complete the first ``num_characters`` of ``text``.

        A stop string that ends there is completed by the last of them.
        """
        if num_characters <= 0:
            return 0
        return min(bisect_left(self._ends, num_characters) + 1, self._num_ids)

    def num_ids_within(self, num_characters: int) -> int:
        """How many ids, from the first, have all their text within the first ``num_characters`` of ``text``."""
        return bisect_right(self._ends, num_characters)

    def num_characters_of(self, num_ids: int) -> int:
        """How long the text of the first ``num_ids`` ids is, as far as it is given out."""
        num_ids = min(num_ids, len(self._ends))
        return self._ends[num_ids - 1] if num_ids else 0

    def _accept(self, texts: list[str]) -> str:
        num_open_ids = self._num_ids - len(self._ends)
        if len(texts) > num_open_ids:  # the first of them are of the prompt: their text goes to the first output id
            num_merged = len(texts) - num_open_ids + 1
            texts = ["".join(texts[:num_merged]), *texts[num_merged:]]
        end = self._ends[-1] if self._ends else 0
        delta = ""
        for text in texts:
            text = self._without_prompt(text)
            end += len(text)
            self._ends.append(end)
            delta += text
        if delta:
            self._parts.append(delta)
        return delta

    def _without_prompt(self, text: str) -> str:
        cut = min(self._num_prompt_characters, len(text))
        self._num_prompt_characters -= cut
        return text[cut:]
