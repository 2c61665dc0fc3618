"""A tokenizer of a checkpoint: :class:`FastTokenizer` wraps one of ``transformers``' fast tokenizers.

``transformers`` finds and reads the files and knows the special tokens and templates; encoding and decoding go to the
``tokenizers`` backend directly. Its settings (truncation, padding) are fixed here once: the wrapper's calls change them
back and forth, which is not safe when several threads tokenise.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from gapless.errors import RequestError
from gapless.text.base_tokenizer import SpecialSpan, Tokenizer
from gapless.text.decoder_chain import BytePieces, TextPieces, read_decoder_chain
from gapless.text.stream_decoder import (
    ByteFallbackStreamDecoder,
    StreamDecoder,
    Utf8StreamDecoder,
    WindowStreamDecoder,
)

__all__ = ["FastTokenizer"]

# Shorter text is encoded in well under a millisecond.
_SHORT_TEXT: Final = 4096


class FastTokenizer(Tokenizer):
    """Encodes and decodes as a ``transformers`` fast tokenizer does.

    Args:
        tokenizer: a ``PreTrainedTokenizerFast``; it belongs to this object from now on.
        vocab_size: rows of the model's embedding.
        eos_token_id: the id that ends a text, if the tokenizer's own is not to be used.
        chat_template: Jinja source, or the name of one of the tokenizer's templates, to use instead of its default.
    """

    def __init__(
        self, tokenizer: Any, *, vocab_size: int, eos_token_id: int | None = None, chat_template: str | None = None
    ) -> None:
        backend: Any = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        special_tokens = {
            token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        super().__init__(
            vocab_size=vocab_size,
            eos_token_id=tokenizer.eos_token_id if eos_token_id is None else eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
            special_tokens=special_tokens,
        )
        self._tokenizer = tokenizer
        self._backend = backend
        self._template = chat_template
        self._chain = read_decoder_chain(_state_of(backend.decoder), backend.get_vocab)
        # By whether special tokens are left out. Filled as ids are decoded; threads may fill the same entry twice.
        self._byte_pieces = {
            skip: BytePieces(backend.id_to_token, self._hidden_ids(skip_special_tokens=skip)) for skip in (False, True)
        }
        self._text_pieces = {
            skip: TextPieces(backend.id_to_token, self._hidden_ids(skip_special_tokens=skip), self._chain)
            for skip in (False, True)
        }
        self._plain_lock = threading.Lock()
        self._plain_backends: _PlainBackends | None = None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        # A long list the way a long text is encoded: letting other threads run meanwhile.
        if len(ids) <= _SHORT_TEXT:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        if self._chain.kind == "byte_level":
            return self._byte_pieces[False][token_id]
        if self._chain.kind == "byte_fallback":
            piece = self._text_pieces[False][token_id]
            if isinstance(piece, int):
                return bytes((piece,))
            return b"" if piece is None else piece.encode()
        return super().token_bytes(token_id)

    def stream_decoder(self, *, skip_special_tokens: bool) -> StreamDecoder:
        if self._chain.kind == "byte_level":
            return Utf8StreamDecoder(self._byte_pieces[skip_special_tokens])
        if self._chain.kind == "byte_fallback":
            return ByteFallbackStreamDecoder(self._text_pieces[skip_special_tokens], self._chain.left_strip)

        def decode(ids: Sequence[int]) -> str:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)

        hidden_ids = self._hidden_ids(skip_special_tokens=skip_special_tokens)
        token_of = self._backend.id_to_token
        return WindowStreamDecoder(decode, lambda token_id: token_id in hidden_ids or token_of(token_id) is None)

    def _hidden_ids(self, *, skip_special_tokens: bool) -> frozenset[int]:
        return self.special_ids if skip_special_tokens else frozenset()

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return _ids(self._backend, text, add_special_tokens=add_special_tokens)

    def _find_special(self, text: str) -> list[SpecialSpan]:
        [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        return [
            SpecialSpan(start=start, end=end, token_id=token_id)
            for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            # The text is compared since an unknown character yields <unk>, which is special, too.
            if self._special_tokens.get(token_id) == text[start:end].strip()
        ]

    def _encode_plain(self, text: str, *, is_start: bool) -> list[int]:
        with self._plain_lock:
            if self._plain_backends is None:
                self._plain_backends = _PlainBackends(self._backend)
        backend = self._plain_backends.at_start if is_start else self._plain_backends.after_start
        return _ids(backend, text, add_special_tokens=False)

    def _chat_template(self, *, has_tools: bool) -> str | None:
        if self._template is None and not self._tokenizer.chat_template:
            return None
        try:
            template: str = self._tokenizer.get_chat_template(self._template, [{}] if has_tools else None)
        except ValueError as error:  # several templates, and none of them is the default
            raise RequestError(f"no chat template was chosen: {error}") from error
        return template

    def _template_variables(self) -> Mapping[str, str]:
        variables: dict[str, str] = dict(self._tokenizer.special_tokens_map)
        if self.eos_token_id != self._tokenizer.eos_token_id:
            variables["eos_token"] = self._backend.id_to_token(self.eos_token_id)
        return variables


class _PlainBackends:
    """Copies of a backend that see no special tokens, built when control text is first typed in a message.

    A copy costs as much memory as the tokenizer, and switching the setting on the shared one would race.
    """

    def __init__(self, backend: Any) -> None:
        description = backend.to_str()
        self.at_start = Backend.from_str(description)
        self.at_start.encode_special_tokens = True
        self.after_start = self.at_start
        if '"prepend_scheme":"first"' in description or '"prepend_scheme": "first"' in description:
            # A Metaspace pre-tokenizer puts a space before the first stretch of a prompt only.
            state = json.loads(description)
            state["pre_tokenizer"] = _without_first_space(state["pre_tokenizer"])
            self.after_start = Backend.from_str(json.dumps(state))
            self.after_start.encode_special_tokens = True


def _ids(backend: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    """Encode a text; a long one lets other threads run meanwhile.

    ``encode`` holds the interpreter's lock from beginning to end, for 3 s with 8 MB on one core of an Intel Xeon, and
    keeps the offsets of all tokens. The call for batches does neither.
    """
    if len(text) <= _SHORT_TEXT:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    else:
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _without_first_space(state: Any) -> Any:
    if isinstance(state, dict):
        return {
            key: "never" if key == "prepend_scheme" and value == "first" else _without_first_space(value)
            for key, value in state.items()
        }
    if isinstance(state, list):
        return [_without_first_space(item) for item in state]
    return state


def _state_of(decoder: Any) -> Mapping[str, Any] | None:
    """The JSON of a decoder: what it is pickled as."""
    if decoder is None:
        return None
    state: Mapping[str, Any] = json.loads(decoder.__getstate__())
    return state
