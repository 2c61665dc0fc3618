"""Incremental detokenisation gives exactly what decoding everything at once gives."""

import functools
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders
from transformers import AutoTokenizer

from fixtures.tokenizers import (
    save_byte_tokenizer,
    save_spm_tokenizer,
    save_word_tokenizer,
    smollm2_gguf,
    spm_bytes,
    spm_id,
)
from gapless.model.checkpoint import TokenizerSource
from gapless.text.byte_tokenizer import ByteTokenizer
from gapless.text.decoder_chain import read_decoder_chain
from gapless.text.detokenizer import IncrementalDetokenizer
from gapless.text.fast_tokenizer import FastTokenizer
from gapless.text.long_texts import PIECE_IDS, decoded_pieces
from gapless.text.tokenizer import Tokenizer, load_tokenizer

SMILE = "\U0001f600"
EXACT = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@functools.cache
def reference(name: str) -> object:
    """The tokenizer as transformers loads it."""
    if name == "smollm2":
        file = smollm2_gguf()
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    builders = {
        "byte": save_byte_tokenizer,
        "spm": save_spm_tokenizer,
        "metaspace": functools.partial(save_word_tokenizer, decoder=decoders.Metaspace()),
        "wordpiece": functools.partial(save_word_tokenizer, decoder=decoders.WordPiece(cleanup=False)),
        "words": functools.partial(save_word_tokenizer, decoder=None),
    }
    with tempfile.TemporaryDirectory() as folder:
        return AutoTokenizer.from_pretrained(builders[name](Path(folder)))


@functools.cache
def tokenizer_named(name: str) -> Tokenizer:
    return ByteTokenizer(vocab_size=320) if name == "own" else FastTokenizer(reference(name), vocab_size=50_000)


def hf_decode(name: str, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """What must come out, from the library itself; our own byte tokenizer is F-BYTE under another name."""
    tokenizer = reference("byte" if name == "own" else name)
    return tokenizer.decode(  # type: ignore[attr-defined]
        list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def stream(detokenizer: IncrementalDetokenizer, updates: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.append(update) for update in updates), detokenizer.finish()]


# Ids that make trouble are drawn often: lead and continuation bytes, spaces, special tokens, ids of no token.
_UTF8_PARTS = b"A \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff\xed\xa0\xc0"
_BYTE_IDS = st.one_of(st.sampled_from(_UTF8_PARTS), st.integers(0, 265), st.sampled_from([256, 259, 260, 300]))
_SPM_IDS = st.one_of(
    st.sampled_from(spm_bytes(_UTF8_PARTS)),
    st.sampled_from([0, 1, 2, spm_id("▁"), spm_id("▁cup"), spm_id("▁s"), spm_id("ab"), 5000]),
    st.integers(0, 375),
)
_SMOLLM2_IDS = st.one_of(st.integers(0, 49_151), st.integers(0, 300), st.sampled_from([0, 1, 2, 49_152, 49_999]))
_WORD_IDS = st.integers(0, 14)
IDS = {
    "byte": _BYTE_IDS,
    "own": _BYTE_IDS,
    "spm": _SPM_IDS,
    "smollm2": _SMOLLM2_IDS,
    "metaspace": _WORD_IDS,
    "wordpiece": _WORD_IDS,
    "words": _WORD_IDS,
}
NAMES = sorted(IDS)


def updates_of(name: str, max_ids: int = 24) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(IDS[name], max_size=6), max_size=max_ids // 3)


@pytest.mark.parametrize("name", NAMES)
def test_c31_deltas_join_to_the_decoding_of_all_ids(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @EXACT
    @given(updates=updates_of(name), skip=st.booleans())
    def check(updates: list[list[int]], skip: bool) -> None:
        ids = [token_id for update in updates for token_id in update]
        expected = hf_decode(name, ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
        assert "".join(stream(detokenizer, updates)) == expected
        assert detokenizer.text == expected

    check()


@pytest.mark.parametrize("name", ["byte", "spm", "smollm2"])
def test_c33_continuation_is_the_end_of_prompt_and_output(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @EXACT
    @given(prompt=st.lists(IDS[name], max_size=8), updates=updates_of(name), skip=st.booleans())
    def check(prompt: list[int], updates: list[list[int]], skip: bool) -> None:
        ids = [token_id for update in updates for token_id in update]
        prompt_text = hf_decode(name, prompt, skip_special_tokens=skip)
        whole = hf_decode(name, prompt + ids, skip_special_tokens=skip)
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=prompt, skip_special_tokens=skip)
        assert "".join(stream(detokenizer, updates)) == whole[len(prompt_text) :]

    check()


@pytest.mark.parametrize("name", ["byte", "own", "spm", "smollm2"])
def test_text_is_attributed_to_the_id_that_completes_it(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @EXACT
    @given(text=st.text(alphabet="ab €é\n" + SMILE, min_size=1, max_size=12))
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer)
        detokenizer.append(ids)
        detokenizer.finish()
        for length in range(1, len(text) + 1):
            count = detokenizer.num_ids_for(length)
            assert tokenizer.decode(ids[:count], skip_special_tokens=True)[:length] == text[:length]
            assert tokenizer.decode(ids[: count - 1], skip_special_tokens=True)[:length] != text[:length]

    check()


@pytest.mark.parametrize("name", ["byte", "own", "spm"])
@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_c31_an_emoji_over_four_tokens(name: str, group: int) -> None:
    ids = [*spm_bytes(SMILE.encode()), spm_id("ab")] if name == "spm" else list((SMILE + "ab").encode())
    detokenizer = IncrementalDetokenizer(tokenizer_named(name))
    chunks = stream(detokenizer, [ids[i : i + group] for i in range(0, len(ids), group)])
    assert "".join(chunks) == SMILE + "ab"
    assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize(("name", "expected"), [("byte", "x\ufffd"), ("own", "x\ufffd"), ("spm", "x\ufffd\ufffd")])
def test_c31_cut_in_mid_character_ends_as_the_tokenizer_decodes(name: str, expected: str) -> None:
    euro = "€".encode()[:2]
    ids = [spm_id("x"), *spm_bytes(euro)] if name == "spm" else [ord("x"), *euro]
    detokenizer = IncrementalDetokenizer(tokenizer_named(name))
    assert detokenizer.append(ids) == "x"
    assert detokenizer.finish() == expected[1:]
    assert detokenizer.text == expected == hf_decode(name, ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["byte", "own", "spm"])
def test_c31_invalid_bytes_flow_without_stalling(name: str) -> None:
    bad = spm_bytes(b"\xff")[0] if name == "spm" else 0xFF
    detokenizer = IncrementalDetokenizer(tokenizer_named(name))
    assert [detokenizer.append([bad]) for _ in range(200)] == ["\ufffd"] * 200


def test_c31_invalid_text_flows_through_a_window_too() -> None:
    tokenizer = tokenizer_named("byte")
    decoder = chained(tokenizer, ["Fuse", "Fuse"]).stream_decoder(skip_special_tokens=True)
    released = sum(len("".join(decoder.push(0xFF))) for _ in range(200))
    assert released >= 180


@pytest.mark.parametrize("name", NAMES)
def test_the_cost_of_an_id_does_not_grow_with_the_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_named(name)
    longest = 0
    decode = tokenizer.decode

    def counted(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    detokenizer = IncrementalDetokenizer(tokenizer)
    detokenizer.append([5] * 2000)
    assert longest <= 24


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [False, True])
def test_pieces_of_a_long_list_join_to_its_decoding(name: str, skip: bool) -> None:
    tokenizer = tokenizer_named(name)
    # Most of them are bytes, so that characters and runs lie across the ends of pieces.
    draw = random.Random(name)
    often = {"spm": spm_bytes(SMILE.encode()), "words": [5], "wordpiece": [5], "metaspace": [5]}.get(name, [240, 159])
    for length in (0, 1, PIECE_IDS, 2 * PIECE_IDS + 1):
        ids = [draw.choice(often) if draw.random() < 0.7 else draw.randrange(320) for _ in range(length)]
        pieces = list(decoded_pieces(ids, tokenizer, skip_special_tokens=skip))
        assert "".join(pieces) == hf_decode(name, ids, skip_special_tokens=skip)
        assert len(pieces) == -(-length // PIECE_IDS) + 1


def test_c33_spaces_of_sentencepiece() -> None:
    tokenizer = tokenizer_named("spm")
    ids = [spm_id("▁"), spm_id("▁cup"), spm_id("▁s")]
    chunks = stream(IncrementalDetokenizer(tokenizer), [[token_id] for token_id in ids])
    assert "".join(chunks) == " cup s"
    assert "".join(stream(IncrementalDetokenizer(tokenizer), [[spm_id("▁s")]])) == "s"
    assert "".join(stream(IncrementalDetokenizer(tokenizer, prompt_ids=[spm_id("▁cup")]), [[spm_id("▁s")]])) == " s"


def test_c33_continuing_a_prompt_that_ends_in_the_middle_of_a_run_of_bytes() -> None:
    tokenizer = tokenizer_named("spm")
    space = IncrementalDetokenizer(tokenizer, prompt_ids=spm_bytes(b" "))
    assert space.append([spm_id("x")]) == "x"  # the space is the one that every text loses
    euro = spm_bytes("€".encode())
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids=euro[:1])
    assert detokenizer.append([*euro[1:], spm_id("x"), spm_id("ab")]) == "xab"  # the prompt's text had one character
    assert [detokenizer.num_ids_for(length) for length in range(4)] == [0, 3, 4, 4]


def test_c33_a_space_of_byte_level_output_is_kept() -> None:
    for name in ("byte", "own"):
        assert "".join(stream(IncrementalDetokenizer(tokenizer_named(name)), [list(b" cup")])) == " cup"


def test_c33_every_prefix_is_final() -> None:
    tokenizer = tokenizer_named("spm")

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(ids=st.lists(_SPM_IDS, max_size=12))
    def check(ids: list[int]) -> None:
        for length in range(len(ids) + 1):
            detokenizer = IncrementalDetokenizer(tokenizer)
            before = detokenizer.append(ids[:length])
            assert hf_decode("spm", ids, skip_special_tokens=True).startswith(before)
            assert before + detokenizer.finish() == hf_decode("spm", ids[:length], skip_special_tokens=True)

    check()


def test_a_skipped_token_does_not_break_a_character() -> None:
    for name, ids in (("byte", [0xE2, 256, 0x82, 259, 0xAC]), ("spm", [229, 1, 133, 2, 175, spm_id("x")])):
        detokenizer = IncrementalDetokenizer(tokenizer_named(name))
        assert "".join(stream(detokenizer, [[token_id] for token_id in ids])) == ("€" if name == "byte" else "€x")
        assert detokenizer.num_ids_for(1) == 5


def test_c39_an_id_without_a_token_has_no_text() -> None:
    for name in ("byte", "own", "smollm2"):
        tokenizer = tokenizer_named(name)
        ids = [*tokenizer.encode("a"), 49_999 if name == "smollm2" else 300, *tokenizer.encode("b")]
        detokenizer = IncrementalDetokenizer(tokenizer)
        assert [detokenizer.append([token_id]) for token_id in ids] == ["a", "", "b"]
        assert detokenizer.num_ids == 3
        assert tokenizer.decode(ids, skip_special_tokens=False) == "ab"


@pytest.mark.parametrize("name", ["metaspace", "wordpiece", "words"])
def test_c39_a_run_of_ids_without_a_token_is_no_start_of_a_text(name: str) -> None:
    """A space before a word belongs to it wherever it is, but at the start of a text is none."""
    for length in (7, 8, 16, 40):
        ids = [5, *[300] * length, 5]
        deltas = stream(IncrementalDetokenizer(tokenizer_named(name)), [[token_id] for token_id in ids])
        assert "".join(deltas) == hf_decode(name, ids, skip_special_tokens=True)
        assert deltas[1:-2] == [""] * length


def chained(tokenizer: Tokenizer, steps: Sequence[str]) -> Tokenizer:
    """A copy of a byte-level tokenizer whose decoder has further steps in front."""
    known = {
        "ByteFallback": decoders.ByteFallback(),
        "Fuse": decoders.Fuse(),
        "Replace": decoders.Replace("▁", " "),
        "Strip": decoders.Strip(" ", 0, 0),
    }
    with tempfile.TemporaryDirectory() as folder:
        copy = AutoTokenizer.from_pretrained(save_byte_tokenizer(Path(folder)))
    copy.backend_tokenizer.decoder = decoders.Sequence([*(known[step] for step in steps), decoders.ByteLevel()])
    if steps == ["Fuse", "Fuse"]:  # a token that is no string of bytes, which makes Fuse matter
        copy.add_tokens(["▁▁"])
    return FastTokenizer(copy, vocab_size=tokenizer.vocab_size)


@pytest.mark.parametrize("steps", [["ByteFallback", "Fuse", "Replace"], ["Strip"]])
def test_a_longer_chain_around_byte_level(steps: list[str]) -> None:
    tokenizer = chained(tokenizer_named("byte"), steps)

    @EXACT
    @given(updates=st.lists(st.lists(st.sampled_from([*"a €é".encode(), 256, 300]), max_size=6), max_size=8))
    def check(updates: list[list[int]]) -> None:
        ids = [token_id for update in updates for token_id in update]
        chunks = stream(IncrementalDetokenizer(tokenizer), updates)
        assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens=True)

    check()


def test_the_chain_of_a_gguf_file_counts_as_byte_level_if_no_token_objects() -> None:
    chain = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    )
    state = json.loads(chain.__getstate__())
    assert read_decoder_chain(state, lambda: ["a", "Ġb", "<|im_end|>"]).kind == "byte_level"
    for odd in ("▁x", "<0x0A>", "a b"):
        assert read_decoder_chain(state, lambda odd=odd: ["a", odd]).kind == "other"


def test_loading_through_a_source_gives_the_same_text(tmp_path: Path) -> None:
    save_spm_tokenizer(tmp_path)
    tokenizer = load_tokenizer(TokenizerSource(kind="folder", path=tmp_path), vocab_size=400)
    assert "".join(stream(IncrementalDetokenizer(tokenizer), [tokenizer.encode("the cup €")])) == "the cup €"
