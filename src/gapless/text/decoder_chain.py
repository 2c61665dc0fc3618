"""Which stream decoder does what a tokenizer's own decoder does: :class:`DecoderChain`.

A ``tokenizers`` decoder is a chain of steps, described by JSON. Two families cover the models that matter, and for
these a token's part in the text is known by itself, whatever stands beside it:

- ``ByteLevel``: the token's characters are bytes in disguise.
- ``Replace``..., ``ByteFallback``, ``Fuse``, ``Strip``: the token is text with ``▁`` for a space, or ``<0x0A>``.

Every other chain is decoded through a window. The chain is read once, when the tokenizer is loaded.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gapless.text.stream_decoder import LeftStrip

__all__ = ["BytePieces", "DecoderChain", "TextPieces", "read_decoder_chain"]

TokenOf = Callable[[int], str | None]

# A byte as a token, as the ByteFallback step reads it (its number parser takes a plus sign as the first digit).
_BYTE_TOKEN: Final = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderChain:
    """What a tokenizer's decoder does to its tokens.

    Attributes:
        kind: the family; the other attributes belong to ``"byte_fallback"``.
        replacements: texts replaced in each token, in order (``{"▁": " "}``).
        reads_bytes: whether tokens like ``<0x0A>`` are bytes.
        left_strip: what is cut off at the start of the text.
    """

    kind: Literal["byte_level", "byte_fallback", "other"]
    replacements: Mapping[str, str]
    reads_bytes: bool
    left_strip: LeftStrip | None


def read_decoder_chain(state: Mapping[str, Any] | None, vocabulary: Callable[[], Iterable[str]]) -> DecoderChain:
    """Classify a decoder.

    Args:
        state: the decoder's JSON, ``None`` for a tokenizer without one.
        vocabulary: gives all tokens; called only if the answer depends on them.
    """
    steps = [] if state is None else _steps(state)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] or (kinds[-1:] == ["ByteLevel"] and _only_byte_level_acts(steps[:-1], vocabulary)):
        return DecoderChain(kind="byte_level", replacements={}, reads_bytes=False, left_strip=None)
    return _byte_fallback_chain(steps) or DecoderChain(
        kind="other", replacements={}, reads_bytes=False, left_strip=None
    )


class BytePieces(dict[int, bytes]):
    """The bytes of each token of a ``ByteLevel`` decoder; filled as ids are asked for, shared by all requests.

    Args:
        token_of: the token of an id, ``None`` beyond the vocabulary.
        hidden_ids: ids that have no part in the text.
    """

    def __init__(self, token_of: TokenOf, hidden_ids: frozenset[int]) -> None:
        super().__init__()
        self._token_of = token_of
        self._hidden_ids = hidden_ids

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._hidden_ids else self._token_of(token_id)
        piece = b"" if token is None else _byte_level_bytes(token)
        self[token_id] = piece
        return piece


class TextPieces(dict[int, str | int | None]):
    """The text or the byte of each token of a byte-fallback decoder; filled as asked for, shared by all requests."""

    def __init__(self, token_of: TokenOf, hidden_ids: frozenset[int], chain: DecoderChain) -> None:
        super().__init__()
        self._token_of = token_of
        self._hidden_ids = hidden_ids
        self._chain = chain

    def __missing__(self, token_id: int) -> str | int | None:
        token = None if token_id in self._hidden_ids else self._token_of(token_id)
        piece = None if token is None else self._piece(token)
        self[token_id] = piece
        return piece

    def _piece(self, token: str) -> str | int:
        for old, new in self._chain.replacements.items():
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._chain.reads_bytes else None
        return int(byte[1], 16) if byte else token


def _steps(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state["decoders"] for step in _steps(part)]


def _only_byte_level_acts(steps: list[Mapping[str, Any]], vocabulary: Callable[[], Iterable[str]]) -> bool:
    """Whether the steps before a final ``ByteLevel`` find nothing to do in any token.

    ``transformers`` gives tokenizers out of GGUF files such a chain. Joining tokens (``Fuse``) makes a difference only
    where a token has a character that stands for no byte: the whole text is then taken as it is.
    """
    patterns = []
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            patterns.append(step["pattern"]["String"])
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return False
    return not any(
        _BYTE_TOKEN.fullmatch(token)
        or any(pattern in token for pattern in patterns)
        or not _BYTE_OF_CHARACTER.keys() >= set(token)
        for token in vocabulary()
    )


def _byte_fallback_chain(steps: list[Mapping[str, Any]]) -> DecoderChain | None:
    """The chain as ``Replace``..., [``ByteFallback``], ``Fuse``, [``Strip`` on the left], or ``None``."""
    remaining = list(steps)
    replacements: dict[str, str] = {}
    while remaining and remaining[0]["type"] == "Replace":
        step = remaining.pop(0)
        old = step["pattern"].get("String")
        if old is None or old in replacements:
            return None
        replacements[old] = step["content"]
    reads_bytes = bool(remaining) and remaining[0]["type"] == "ByteFallback"
    if reads_bytes:
        remaining.pop(0)
    if not remaining or remaining.pop(0)["type"] != "Fuse":
        return None
    left_strip = None
    if remaining and remaining[0]["type"] == "Strip" and remaining[0]["stop"] == 0:
        step = remaining.pop(0)
        left_strip = LeftStrip(character=step["content"], count=step["start"])
    if remaining:
        return None
    return DecoderChain(kind="byte_fallback", replacements=replacements, reads_bytes=reads_bytes, left_strip=left_strip)


def _byte_level_bytes(token: str) -> bytes:
    """The bytes behind a token's characters; a token with any other character stands for itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's disguise of bytes: printable Latin-1 stands for itself, the rest is moved up to U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(moved)}


_BYTE_OF_CHARACTER: Final = _byte_level_alphabet()
