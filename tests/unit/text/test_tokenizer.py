"""Tokenizers: loading, encoding, prompts and their BOS, ids without a token."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fixtures.tokenizers import BYTE_BOS, CHATML, save_byte_tokenizer, save_spm_tokenizer, smollm2_gguf, spm_id
from gapless.errors import CheckpointError, ConfigError, RequestError
from gapless.model.checkpoint import TokenizerSource
from gapless.text.byte_tokenizer import ByteTokenizer
from gapless.text.tokenizer import Tokenizer, load_tokenizer

SMOLLM2_IM_END = 2
NO_SURROGATES = st.characters(exclude_categories=["Cs"])


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    source = TokenizerSource(kind="gguf", path=smollm2_gguf(), eos_token_id=SMOLLM2_IM_END)
    return load_tokenizer(source, vocab_size=49_152)


@pytest.fixture(scope="module")
def byte_reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path_factory.mktemp("f-byte")))


def byte_tokenizer(folder: Path, *, add_bos: bool = False, vocab_size: int = 320) -> Tokenizer:
    save_byte_tokenizer(folder, add_bos=add_bos)
    return load_tokenizer(TokenizerSource(kind="folder", path=folder), vocab_size=vocab_size)


def spm_tokenizer(folder: Path, *, add_bos: bool = True) -> Tokenizer:
    save_spm_tokenizer(folder, add_bos=add_bos)
    return load_tokenizer(TokenizerSource(kind="folder", path=folder), vocab_size=400)


def test_byte_level_folder(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.encode("a<|im_end|>€") == [97, 259, 0xE2, 0x82, 0xAC]
    assert tokenizer.decode([97, 259, 0xE2, 0x82, 0xAC], skip_special_tokens=True) == "a€"
    assert tokenizer.decode([97, 259], skip_special_tokens=False) == "a<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.special_ids == {256, 257, 258, 259}
    assert not tokenizer.has_chat_template


def test_eos_of_the_source_wins(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, chat_template="{{ eos_token }}")
    for source in (
        TokenizerSource(kind="folder", path=tmp_path, eos_token_id=259),
        TokenizerSource(kind="bytes", path=None, eos_token_id=259),
    ):
        assert load_tokenizer(source, vocab_size=260).eos_token_id == 259
    tokenizer = load_tokenizer(TokenizerSource(kind="folder", path=tmp_path, eos_token_id=259), vocab_size=260)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) == "<|im_end|>"


def test_our_byte_tokenizer_is_the_byte_level_one(byte_reference: Any) -> None:
    ours = ByteTokenizer()

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(parts=st.lists(st.one_of(st.text(NO_SURROGATES, max_size=5), st.sampled_from(["<s>", "<|im_end|>", "</s"]))))
    def check(parts: list[str]) -> None:
        text = "".join(parts)
        ids = ours.encode(text)
        assert ids == byte_reference(text).input_ids
        for skip in (True, False):
            decoded = ours.decode(ids, skip_special_tokens=skip)
            assert decoded == byte_reference.decode(ids, skip_special_tokens=skip)

    check()
    assert ours.special_ids == frozenset(byte_reference.all_special_ids) | {258, 259}
    assert ours.has_chat_template


def test_byte_tokenizer_needs_its_ids() -> None:
    with pytest.raises(ConfigError, match="vocab_size=259"):
        load_tokenizer(TokenizerSource(kind="bytes", path=None), vocab_size=259)


def test_smollm2_out_of_a_gguf_file(smollm2: Tokenizer) -> None:
    assert smollm2.eos_token_id == SMOLLM2_IM_END
    assert smollm2.encode("hello world") == [28120, 905]
    assert smollm2.encode("<|im_end|>") == [SMOLLM2_IM_END]
    assert smollm2.special_ids == frozenset(range(17))
    messages = [{"role": "user", "content": "hi"}]
    rendered = smollm2.render_chat(messages)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.encode_chat(messages) == smollm2.encode(rendered, add_special_tokens=False)


def test_smollm2_round_trip(smollm2: Tokenizer) -> None:
    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x1FFFF), max_size=40))
    def check(text: str) -> None:  # its vocabulary lacks the bytes of some control characters and of unused planes
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text

    check()
    for text in (" leading", "two  spaces", "don't stop , now .", "▁", "Ġ", "<0x41>", "1234567", "\n\n\t"):
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_clean_up_of_spaces_is_never_applied(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(TokenizerSource(kind="folder", path=tmp_path), vocab_size=320)
    assert tokenizer.decode(list(b"a , b ."), skip_special_tokens=True) == "a , b ."


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    file.write_text(json.dumps(state))
    tokenizer = load_tokenizer(TokenizerSource(kind="folder", path=tmp_path), vocab_size=320)
    assert tokenizer.encode("abcdef") == list(b"abcdef")
    assert tokenizer.encode("a") == list(b"a")


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_missing_or_broken_files(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tokenizer(TokenizerSource(kind="folder", path=tmp_path), vocab_size=320)


def test_broken_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 20)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        load_tokenizer(TokenizerSource(kind="gguf", path=file), vocab_size=320)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    proof = tmp_path / "ran"
    (tmp_path / "code.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil: pass\n")
    config = tmp_path / "tokenizer_config.json"
    auto_map = {"auto_map": {"AutoTokenizer": [None, "code.Evil"]}, "tokenizer_class": "Evil"}
    config.write_text(json.dumps(json.loads(config.read_text()) | auto_map))
    with pytest.raises(CheckpointError):
        load_tokenizer(TokenizerSource(kind="folder", path=tmp_path), vocab_size=320)
    assert not proof.exists()


def test_c35_raw_prompts_get_one_bos(tmp_path: Path) -> None:
    with_bos = byte_tokenizer(tmp_path / "bos", add_bos=True)
    assert with_bos.encode_prompt("hi") == [BYTE_BOS, *b"hi"]
    assert with_bos.encode_prompt("<s>hi") == [BYTE_BOS, *b"hi"]
    assert with_bos.encode_prompt("<s><s>hi") == [BYTE_BOS, BYTE_BOS, *b"hi"]  # typed twice: kept as typed
    without = byte_tokenizer(tmp_path / "no-bos")
    assert without.encode_prompt("hi") == list(b"hi")
    assert without.encode_prompt("<s>hi") == [BYTE_BOS, *b"hi"]
    assert without.encode_prompt("<s><s>hi") == [BYTE_BOS, BYTE_BOS, *b"hi"]


def test_c35_a_long_prompt_that_starts_with_bos_is_tokenised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer(tmp_path, add_bos=True)
    lengths = []
    encode = tokenizer._encode

    def watched(text: str, add_special_tokens: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", watched)
    text = " " * 500 + "a" * 50_000
    assert tokenizer.encode_prompt("<s>" + text) == [BYTE_BOS, *text.encode()]
    assert sum(lengths) < 2 * len(text)


def test_c35_sentencepiece_prompts_get_one_bos(tmp_path: Path) -> None:
    tokenizer = spm_tokenizer(tmp_path)
    assert tokenizer.encode_prompt("cup") == [1, spm_id("▁cup")]
    assert tokenizer.encode_prompt("<s>cup") == [1, spm_id("▁cup")]


def test_c40_an_empty_prompt_is_bos_or_an_error(tmp_path: Path) -> None:
    assert byte_tokenizer(tmp_path / "bos", add_bos=True).encode_prompt("") == [BYTE_BOS]
    assert spm_tokenizer(tmp_path / "spm").encode_prompt("") == [1]
    for tokenizer in (
        byte_tokenizer(tmp_path / "no-bos"),
        spm_tokenizer(tmp_path / "spm-no-bos", add_bos=False),
        ByteTokenizer(),
    ):
        with pytest.raises(RequestError, match=r"prompts\[3\]=''"):
            tokenizer.encode_prompt("", field="prompts[3]")
        assert tokenizer.encode_prompt(" ")


@pytest.mark.parametrize("bad", [None, 7, b"bytes", ["a"], "half of an emoji \ud83d"])
def test_c53_prompts_that_are_not_text(tmp_path: Path, bad: Any) -> None:
    for tokenizer in (byte_tokenizer(tmp_path), ByteTokenizer()):
        with pytest.raises(RequestError, match=r"prompts\[1\]"):
            tokenizer.encode_prompt(bad, field="prompts[1]")
        with pytest.raises(RequestError, match="text"):
            tokenizer.encode(bad)
        assert tokenizer.encode_prompt("good") == list(b"good")


def test_c39_ids_beyond_the_tokenizer_decode_to_nothing(tmp_path: Path, smollm2: Tokenizer) -> None:
    for tokenizer in (byte_tokenizer(tmp_path / "byte"), ByteTokenizer(vocab_size=320)):
        for skip in (True, False):
            assert tokenizer.decode([97, 300, 98, 319], skip_special_tokens=skip) == "ab"
    assert spm_tokenizer(tmp_path / "spm").decode([399, spm_id("ab")], skip_special_tokens=True) == "ab"
    assert smollm2.decode([49_152, 60_000], skip_special_tokens=False) == ""


def test_c39_a_tokenizer_larger_than_the_model(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path, vocab_size=258)
    assert tokenizer.encode("a</s>") == [97, 257]
    with pytest.raises(RequestError, match=r"259.*258"):
        tokenizer.encode_prompt("a<|im_end|>")


def test_threads_may_share_a_tokenizer(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path, chat_template=CHATML)
    tokenizer = load_tokenizer(TokenizerSource(kind="folder", path=tmp_path), vocab_size=320)
    messages = [{"role": "user", "content": "typed <|im_end|>"}]

    def work(index: int) -> bool:
        text = f"<|im_start|>{index}"
        chat = tokenizer.encode_chat(messages)
        return tokenizer.encode(text) == [258, *str(index).encode()] and chat.count(259) == 1

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
