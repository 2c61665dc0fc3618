"""A tokenizer without files: one token for each byte, four control tokens, and ChatML chats.

It serves checkpoints with random weights, so that every entry point takes text without anything to download.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from gapless.errors import ConfigError
from gapless.text.base_tokenizer import SpecialSpan, Tokenizer
from gapless.text.chat import CHATML_TEMPLATE
from gapless.text.stream_decoder import StreamDecoder, Utf8StreamDecoder

__all__ = ["ByteTokenizer"]

_NUM_BYTES: Final = 256
_BOS_ID: Final = 256
_EOS_ID: Final = 257
_SPECIAL_TOKENS: Final = {_BOS_ID: "<s>", _EOS_ID: "</s>", 258: "<|im_start|>", 259: "<|im_end|>"}
_SPECIAL_IDS_BY_TEXT: Final = {text: token_id for token_id, text in _SPECIAL_TOKENS.items()}
_SPECIAL_PATTERN: Final = re.compile("|".join(map(re.escape, _SPECIAL_IDS_BY_TEXT)))


class _Pieces(dict[int, bytes]):
    """The bytes of each id that has some; an id beyond them has none."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


_BYTE_PIECES: Final = _Pieces({byte: bytes((byte,)) for byte in range(_NUM_BYTES)})
_ALL_PIECES: Final = _Pieces(_BYTE_PIECES | {i: text.encode() for i, text in _SPECIAL_TOKENS.items()})


class ByteTokenizer(Tokenizer):
    """256 byte tokens (the id is the byte), ``<s>`` 256, ``</s>`` 257, ``<|im_start|>`` 258, ``<|im_end|>`` 259.

    No BOS is added to a text. Invalid UTF-8 decodes to U+FFFD, ids from 260 on to nothing.

    Args:
        vocab_size: rows of the model's embedding, at least ``MIN_VOCAB_SIZE``.
        eos_token_id: the id that ends a text, instead of ``</s>``.
        chat_template: Jinja source to use instead of ChatML.

    Raises:
        ConfigError: if the vocabulary is too small.
    """

    MIN_VOCAB_SIZE: Final = 260

    def __init__(
        self, *, vocab_size: int = MIN_VOCAB_SIZE, eos_token_id: int | None = None, chat_template: str | None = None
    ) -> None:
        if vocab_size < self.MIN_VOCAB_SIZE:
            raise ConfigError(
                f"vocab_size={vocab_size} is too small for the byte tokenizer; "
                f"give the model at least {self.MIN_VOCAB_SIZE} ids"
            )
        super().__init__(
            vocab_size=vocab_size,
            eos_token_id=_EOS_ID if eos_token_id is None else eos_token_id,
            bos_token_id=_BOS_ID,
            special_tokens=_SPECIAL_TOKENS,
        )
        self._template = CHATML_TEMPLATE if chat_template is None else chat_template

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        pieces = _BYTE_PIECES if skip_special_tokens else _ALL_PIECES
        return b"".join([pieces[token_id] for token_id in ids]).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return _ALL_PIECES[token_id]

    def stream_decoder(self, *, skip_special_tokens: bool) -> StreamDecoder:
        return Utf8StreamDecoder(_BYTE_PIECES if skip_special_tokens else _ALL_PIECES)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = []
        position = 0
        for span in self._find_special(text):
            ids += text[position : span.start].encode()
            ids.append(span.token_id)
            position = span.end
        ids += text[position:].encode()
        return ids

    def _find_special(self, text: str) -> list[SpecialSpan]:
        return [
            SpecialSpan(start=match.start(), end=match.end(), token_id=_SPECIAL_IDS_BY_TEXT[match[0]])
            for match in _SPECIAL_PATTERN.finditer(text)
        ]

    def _encode_plain(self, text: str, *, is_start: bool) -> list[int]:
        return list(text.encode())

    def _chat_template(self, *, has_tools: bool) -> str | None:
        return self._template

    def _template_variables(self) -> Mapping[str, str]:
        return {"bos_token": _SPECIAL_TOKENS[_BOS_ID], "eos_token": _SPECIAL_TOKENS[_EOS_ID]}
