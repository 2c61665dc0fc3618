"""The bytes of single tokens: put together they are the text, also where a token alone is none."""

from pathlib import Path

import pytest
from tokenizers import decoders

from fixtures.tokenizers import (
    BYTE_EOS,
    save_byte_tokenizer,
    save_spm_tokenizer,
    save_word_tokenizer,
    spm_bytes,
    spm_id,
    spm_vocabulary,
)
from gapless.model.checkpoint import TokenizerSource
from gapless.text.byte_tokenizer import ByteTokenizer
from gapless.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "naïve \N{GRINNING FACE} 5 €"


def loaded(folder: Path, vocab_size: int) -> Tokenizer:
    return load_tokenizer(TokenizerSource(kind="folder", path=folder, eos_token_id=None), vocab_size=vocab_size)


@pytest.mark.parametrize("kind", ["folder", "built in"])
def test_byte_level(tmp_path: Path, kind: str) -> None:
    tokenizer = loaded(save_byte_tokenizer(tmp_path), 320) if kind == "folder" else ByteTokenizer(vocab_size=320)
    ids = tokenizer.encode(TEXT)
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()
    assert [tokenizer.token_bytes(byte) for byte in range(256)] == [bytes((byte,)) for byte in range(256)]
    assert tokenizer.token_bytes(BYTE_EOS) == b"</s>"
    assert tokenizer.token_bytes(300) == b""


def test_byte_fallback(tmp_path: Path) -> None:
    tokenizer = loaded(save_spm_tokenizer(tmp_path), len(spm_vocabulary()) + 8)
    assert tokenizer.token_bytes(spm_id("▁the")) == b" the"
    euro = "€".encode()
    assert [tokenizer.token_bytes(token) for token in spm_bytes(euro)] == [bytes((byte,)) for byte in euro]
    assert tokenizer.token_bytes(len(spm_vocabulary())) == b""


def test_other_decoders(tmp_path: Path) -> None:
    tokenizer = loaded(save_word_tokenizer(tmp_path, decoder=decoders.WordPiece()), 16)
    assert tokenizer.token_bytes(10) == "é".encode()
