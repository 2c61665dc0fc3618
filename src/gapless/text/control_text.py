"""Control text typed by a user stays plain text: :class:`ControlTexts` and :class:`ControlTextMask`.

A chat template writes control tokens (``<|im_end|>``) between the messages. If a message holds the same characters,
tokenising the rendered chat would make a control token of them too, and the message could end its own turn and forge
the next one. Before rendering, every such text in a message is replaced by a mask: a decimal number nobody can guess,
which templates treat as they treat the text (it is not empty, has no white space, and survives trimming). After
rendering, whatever control tokens are found are the template's own, and each mask is put back as plain text.

:class:`ControlTexts` belongs to a tokenizer and does not change; a mask serves one chat.
"""

import re
import secrets
from collections.abc import Iterable

from gapless.text.chat import JsonValue

__all__ = ["ControlTextMask", "ControlTexts"]

_NONCE_DIGITS = 30
_INDEX_DIGITS = 6


class ControlTexts:
    """The contents of a tokenizer's special tokens, numbered, and a pattern that finds them."""

    def __init__(self, texts: Iterable[str]) -> None:
        # The longest first, as the tokenizer matches: `<|a|>` must not win over `<|a|><|b|>`.
        self.texts = sorted({text for text in texts if text}, key=lambda text: (-len(text), text))
        self.indices = {text: index for index, text in enumerate(self.texts)}
        self.pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None


class ControlTextMask:
    """Replaces control text in a chat's strings by masks, and masks in text by what they stand for."""

    def __init__(self, control_texts: ControlTexts) -> None:
        self._control_texts = control_texts
        self._nonce = str(secrets.randbelow(10**_NONCE_DIGITS)).zfill(_NONCE_DIGITS)
        self._mask_pattern = re.compile(rf"{self._nonce}([0-9]{{{_INDEX_DIGITS}}})")
        self._found = False

    @property
    def found(self) -> bool:
        """Whether any string masked so far held control text."""
        return self._found

    def mask(self, value: JsonValue) -> JsonValue:
        """A copy of a JSON-like value with the control text in each of its strings masked; keys stay as they are."""
        if isinstance(value, str):
            return self._mask_text(value)
        if isinstance(value, dict):
            return {key: self.mask(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mask(item) for item in value]
        return value

    def unmask(self, text: str) -> str:
        """``text`` with each mask replaced by the control text it stands for."""
        return self._mask_pattern.sub(lambda match: self._control_texts.texts[int(match[1])], text)

    def control_texts_in(self, text: str) -> set[str]:
        """The control texts whose masks ``text`` holds."""
        return {self._control_texts.texts[int(match[1])] for match in self._mask_pattern.finditer(text)}

    def _mask_text(self, text: str) -> str:
        if self._control_texts.pattern is None:
            return text
        indices = self._control_texts.indices
        masked, count = self._control_texts.pattern.subn(
            lambda match: f"{self._nonce}{indices[match[0]]:0{_INDEX_DIGITS}}", text
        )
        self._found = self._found or count > 0
        return masked
