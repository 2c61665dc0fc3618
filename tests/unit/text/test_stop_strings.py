"""Stop strings end a text where the text says, however it is split into tokens and tokens into updates."""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fixtures.tokenizers import (
    BYTE_EOS,
    BYTE_IM_END,
    BYTE_IM_START,
    save_byte_tokenizer,
    save_spm_tokenizer,
    smollm2_gguf,
    spm_bytes,
    spm_id,
    spm_vocabulary,
)
from gapless.text.byte_tokenizer import ByteTokenizer
from gapless.text.detokenizer import IncrementalDetokenizer
from gapless.text.fast_tokenizer import FastTokenizer
from gapless.text.stop_strings import StopStringCheck
from gapless.text.tokenizer import Tokenizer

EXACT = settings(max_examples=200, deadline=None, derandomize=True, database=None)
SMILE = "\U0001f600"
IM_END = "<|im_end|>"
SPECIAL_TEXTS = {BYTE_EOS: "</s>", BYTE_IM_START: "<|im_start|>", BYTE_IM_END: IM_END}


@functools.cache
def tokenizer_named(name: str) -> Tokenizer:
    if name == "own":
        return ByteTokenizer(vocab_size=320)
    if name == "smollm2":
        file = smollm2_gguf()
        loaded = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        return FastTokenizer(loaded, vocab_size=50_000)
    with tempfile.TemporaryDirectory() as folder:
        save = {"byte": save_byte_tokenizer, "spm": save_spm_tokenizer}[name]
        return FastTokenizer(AutoTokenizer.from_pretrained(save(Path(folder))), vocab_size=50_000)


@dataclass(frozen=True)
class Outcome:
    """What became of a run: the ids that count, the text, and the stop string."""

    num_ids: int
    text: str
    stop: str | None
    deltas: tuple[str, ...] = ()


def run_check(check: StopStringCheck, updates: Sequence[Sequence[int]]) -> Outcome:
    """Feed ids until a match is decided or they end; the text is taken once for each update."""
    deltas: list[str] = []
    settled = given_out = 0
    match = None
    for update in updates:
        for token_id in update:
            match = check.append(token_id)
            given_out += 1
            assert settled <= check.num_settled_ids <= given_out, "ids that were given out are not taken back"
            settled = check.num_settled_ids
            if match is not None:
                break
        deltas.append(check.take_text())
        if match is not None:
            break
    assert check.end() == (match or check.end())
    match = check.end()
    deltas.append(check.take_text())
    assert check.num_settled_ids >= settled
    num_ids = given_out if match is None else match.num_ids
    return Outcome(num_ids, "".join(deltas), match.stop if match else None, tuple(deltas))


def first_match(text: str, stops: Sequence[str], ids_for: Sequence[int], min_tokens: int = 0) -> tuple[int, str] | None:
    """Where the earliest stop starts, and which; ``ids_for[end]`` ids complete the first ``end`` characters."""
    found = []
    for stop in stops:
        start = text.find(stop)
        while start >= 0 and ids_for[start + len(stop)] < min_tokens:
            start = text.find(stop, start + 1)
        if start >= 0:
            found.append((start, len(stop), stop))
    return (min(found)[0], min(found)[2]) if found else None


def completing_ids(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """For each length of a valid text, how many ids it takes until the decoding begins with that much of it."""
    counts = [0]
    decoded = [tokenizer.decode(ids[:count], skip_special_tokens=False) for count in range(len(ids) + 1)]
    for end in range(1, len(text) + 1):
        counts.append(next(n for n, prefix in enumerate(decoded) if n >= counts[-1] and prefix[:end] == text[:end]))
    return counts


def check_of(
    name: str, stops: Sequence[str], *, skip: bool = True, include: bool = False, least: int = 0
) -> StopStringCheck:
    return StopStringCheck(
        tokenizer_named(name), stops, skip_special_tokens=skip, include_stop=include, min_tokens=least
    )


def grouped(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Ids in updates of the given sizes, and the rest one by one."""
    updates, position = [], 0
    for size in sizes:
        updates.append(list(ids[position : position + size]))
        position += size
    return [*updates, *([token_id] for token_id in ids[position:])]


# Few characters, so that stops overlap, and some of several bytes.
TEXTS = st.text(alphabet="ab\n 。é" + SMILE, max_size=6)
STOPS = st.lists(st.text(alphabet="ab\n 。é" + SMILE, min_size=1, max_size=4), min_size=1, max_size=5, unique=True)
SIZES = st.lists(st.integers(0, 5), max_size=8)


def ids_of(name: str, chunks: Sequence[str]) -> list[int]:
    """Tokens of a text whose parts are tokenised each by itself."""
    if name == "spm":  # characters as tokens or as bytes, words as they are
        vocabulary = spm_vocabulary()
        ids: list[int] = []
        for index, chunk in enumerate(chunks):
            for character in chunk.replace(" ", "▁"):
                as_bytes = character not in vocabulary or index % 2
                ids += spm_bytes(character.replace("▁", " ").encode()) if as_bytes else [spm_id(character)]
        return ids
    return [i for chunk in chunks for i in tokenizer_named(name).encode(chunk, add_special_tokens=False)]


@pytest.mark.parametrize("name", ["own", "byte", "spm", "smollm2"])
def test_c29_text_ends_before_the_earliest_stop_however_it_is_split(name: str) -> None:
    tokenizer = tokenizer_named(name)

    @EXACT
    @given(
        chunks=st.lists(TEXTS, max_size=8), stops=STOPS, sizes=SIZES, include=st.booleans(), least=st.integers(0, 12)
    )
    def check(chunks: list[str], stops: list[str], sizes: list[int], include: bool, least: int) -> None:
        ids = ids_of(name, chunks)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        ids_for = completing_ids(tokenizer, ids, text)
        found = first_match(text, stops, ids_for, least)
        outcome = run_check(check_of(name, stops, include=include, least=least), grouped(ids, sizes))
        if found is None:
            assert (outcome.text, outcome.num_ids, outcome.stop) == (text, len(ids), None)
            return
        start, stop = found
        expected = text[:start] + (stop if include else "")
        assert (outcome.text, outcome.num_ids, outcome.stop) == (expected, ids_for[start + len(stop)], stop)

    check()


@pytest.mark.parametrize("name", ["own", "spm", "smollm2"])
def test_c29_any_ids_at_all(name: str) -> None:
    """Invalid bytes, special tokens and ids of no token: the text is the decoding, cut at the earliest stop."""
    tokenizer = tokenizer_named(name)
    ids_drawn = st.one_of(st.integers(0, 375), st.sampled_from([97, 0xE2, 0x82, 0xAC, 100, 256, 259, 300]))

    @EXACT
    @given(
        ids=st.lists(ids_drawn, max_size=20),
        stops=st.lists(st.text(alphabet="a�€d<b", min_size=1, max_size=2), min_size=1, max_size=4),
        sizes=SIZES,
    )
    def check(ids: list[int], stops: list[str], sizes: list[int]) -> None:
        text = tokenizer.decode(ids, skip_special_tokens=False)
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        detokenizer.append(ids)
        detokenizer.finish()
        ids_for = [detokenizer.num_ids_for(end) for end in range(len(text) + 1)]
        found = first_match(text, stops, ids_for)
        outcome = run_check(check_of(name, stops, skip=False), grouped(ids, sizes))
        assert outcome.text == (text if found is None else text[: found[0]])
        assert outcome.num_ids == (len(ids) if found is None else ids_for[found[0] + len(found[1])])

    check()


def shown_part(part: str | int) -> str:
    return SPECIAL_TEXTS[part] if isinstance(part, int) else part


def test_c34_stops_with_the_text_of_special_tokens_that_are_not_shown() -> None:
    """The text without special tokens is cut where a match in the text with them begins."""
    parts = st.lists(st.sampled_from(["a", "b", SMILE, BYTE_IM_END, BYTE_EOS]), max_size=14)
    slices = st.lists(st.tuples(st.integers(0, 13), st.integers(1, 4)), min_size=1, max_size=4)

    @settings(EXACT, max_examples=1000)
    @given(parts=parts, slices=slices, others=st.lists(parts.filter(bool), max_size=1), sizes=SIZES)
    @example(parts=[BYTE_EOS, "a", BYTE_IM_END, "b"], slices=[(0, 4), (1, 2)], others=[], sizes=[])
    @example(
        parts=[BYTE_EOS, "a", BYTE_IM_END, "a"], slices=[(1, 2)], others=[[BYTE_EOS, "a", BYTE_IM_END, "b"]], sizes=[]
    )
    @example(parts=["a", BYTE_EOS, "b", "b"], slices=[(0, 4)], others=[], sizes=[])
    def check(
        parts: list[str | int], slices: list[tuple[int, int]], others: list[list[str | int]], sizes: list[int]
    ) -> None:
        chosen = [parts[start : start + length] for start, length in slices] + others
        stops = list(dict.fromkeys("".join(map(shown_part, part)) for part in chosen if part)) or ["never"]
        ids: list[int] = []
        full = visible = ""
        full_ids, visible_ids, visible_at = [0], [0], [0]  # by position: ids to complete it, and its visible place
        for part in parts:
            text = shown_part(part)
            ids += [part] if isinstance(part, int) else list(part.encode())
            full += text
            full_ids += [len(ids)] * len(text)
            if not isinstance(part, int):
                visible += text
                visible_ids.append(len(ids))
            visible_at += [len(visible)] * len(text)
        special = [stop for stop in stops if any(text in stop for text in SPECIAL_TEXTS.values())]
        candidates = []
        if (seen := first_match(visible, stops, visible_ids)) is not None:
            candidates.append((seen[0], visible_ids[seen[0] + len(seen[1])], seen[1]))
        if (hidden := first_match(full, special, full_ids)) is not None:
            candidates.append((visible_at[hidden[0]], full_ids[hidden[0] + len(hidden[1])], hidden[1]))
        outcome = run_check(check_of("own", stops), grouped(ids, sizes))
        if not candidates:
            assert (outcome.text, outcome.num_ids, outcome.stop) == (visible, len(ids), None)
            return
        start, num_ids, stop = min(candidates, key=lambda candidate: candidate[:2])
        assert (outcome.text, outcome.num_ids, outcome.stop) == (visible[:start], num_ids, stop)

    check()


@pytest.mark.parametrize("skip", [True, False])
def test_c34_the_text_of_a_special_token_stops_as_token_and_as_text(skip: bool) -> None:
    as_token = [*b"hi", BYTE_IM_END, *b"more"]
    as_text = [*f"hi{IM_END}more".encode()]
    for ids, num_ids in ((as_token, 3), (as_text, 12)):
        outcome = run_check(check_of("own", [IM_END], skip=skip), [ids])
        assert (outcome.text, outcome.num_ids, outcome.stop) == ("hi", num_ids, IM_END)
    # Nothing that may still become the stop goes out, and an unfinished character before it ends as U+FFFD.
    outcome = run_check(check_of("own", ["i" + IM_END], skip=skip), [[token_id] for token_id in as_token])
    assert outcome.deltas[:2] == ("h", "")
    outcome = run_check(check_of("own", [IM_END], skip=skip), [[ord("h"), 0xE2, BYTE_IM_END, 0x82, 0xAC]])
    assert (outcome.text, outcome.num_ids) == ("h�", 3)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "num_pieces"),
    [
        (["Red gr", "een bl", "ue sk", "y."], ["een blue"], "Red gr", 3),
        (["Red gr", "een bl", "ue sk", "y."], ["d g"], "Re", 1),
        (["Red gr", "een bl", "ue sk", "y."], ["sk", "bl", "Y"], "Red green ", 2),
        (["aa", "ab"], ["aab"], "a", 2),
        (["x", SMILE, "y"], [SMILE], "x", 2),
        (["a", "\n", "\n", "b"], ["\n\n"], "a", 3),
        # One stop inside another: the outer one starts first if it comes, else the inner one counts.
        (["a", "b", "c", "d"], ["b", "abc"], "", 3),
        (["a", "b", "x", "d"], ["b", "abc"], "a", 2),
        (["a", "b"], ["b", "abc"], "a", 2),
    ],
)
def test_c29_made_up_scripts(pieces: list[str], stops: list[str], text: str, num_pieces: int) -> None:
    outcome = run_check(check_of("own", stops), [list(piece.encode()) for piece in pieces])
    assert outcome.text == text
    assert outcome.stop in stops
    stop_end = len((text + str(outcome.stop)).encode())
    assert outcome.num_ids == stop_end <= len("".join(pieces[:num_pieces]).encode())
    assert not any(delta and delta in str(outcome.stop) for delta in outcome.deltas if not text.endswith(delta))


def test_c37_a_stop_string_before_min_tokens_does_not_count() -> None:
    ids = [list(b"aaaab")]
    assert run_check(check_of("own", ["aa"], least=2), ids) == Outcome(2, "", "aa", ("", ""))
    assert run_check(check_of("own", ["aa"], least=4), ids).text == "aa"
    assert run_check(check_of("own", ["aa"], least=5), ids) == Outcome(5, "aaaab", None, ("aaaab", ""))


def test_long_stops_cost_no_more_than_their_text() -> None:
    stop = "a" * 4000 + "b"
    check = check_of("own", [stop])
    assert all(check.append(ord("a")) is None for _ in range(8000))
    assert check.num_settled_ids == 8000
    assert check.take_text() == "a" * 4000
    assert check.append(ord("b")) is not None
    assert check.take_text() == ""
