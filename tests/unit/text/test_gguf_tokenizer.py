"""A tokenizer out of a GGUF file is the one that ``AutoTokenizer`` makes of it, which takes ten times as long."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gapless.model.checkpoint import TokenizerSource
from gapless.text.tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
_TEXTS = ["", "hi", " hi hi\n", "h\u00e9 \U0001f600 <|im_end|></s><s>", "12 345  6"]


def _write_byte_level(writer: Any) -> None:
    letters = bytes_to_unicode()
    tokens = [letters[byte] for byte in range(256)] + ["hi", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)


def _write_sentencepiece(writer: Any) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "i", "hi", "\u2581hi"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 5)
    writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)


@pytest.mark.parametrize("write", [_write_byte_level, _write_sentencepiece])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_ids_and_chats_are_those_of_auto_tokenizer(tmp_path: Path, architecture: str, write: Any) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    for add in ("context_length", "embedding_length", "feed_forward_length", "head_count", "head_count_kv"):
        getattr(writer, f"add_{add}")(16)
    writer.add_block_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(264)
    write(writer)
    writer.add_chat_template(_TEMPLATE)
    writer.add_tensor("token_embd.weight", np.zeros((264, 16), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours = load_tokenizer(TokenizerSource(kind="gguf", path=path), vocab_size=264)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name, local_files_only=True)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.special_ids >= set(theirs.all_special_ids)
    for text in _TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    messages = [{"role": "user", "content": "hi hi"}]
    assert ours.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False)
