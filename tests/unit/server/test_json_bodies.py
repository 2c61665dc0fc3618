"""Strict JSON: whatever is JSON and not treacherous is read as it is."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.server.error_bodies import ApiError
from gapless.server.json_bodies import (
    MAX_CONTAINERS,
    MAX_FRACTIONS,
    MAX_NESTING,
    MAX_STRINGS,
    MAX_VALUES,
    read_json,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


# So many make a body one that is parsed without keeping the interpreter's lock.
SPACES = b" " * (512 << 10)


@given(st.dictionaries(texts, values, max_size=5), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_json_is_read_as_it_is(value: dict[str, Any], ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert read_json(body) == value
    assert read_json(body + SPACES) == value


@given(st.dictionaries(texts, values, min_size=1, max_size=3), st.integers(0, 200), st.binary(max_size=8))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_whatever_comes_is_read_or_refused(value: dict[str, Any], place: int, noise: bytes) -> None:
    body = json.dumps(value).encode()
    try:
        content = read_json(body[:place] + noise + body[place:])
    except ApiError as refused:
        content = {"status": refused.status}
    assert isinstance(content, dict)
    assert content.get("status", 400) == 400 or "status" in value


@pytest.mark.parametrize("spaces", [b"", SPACES])
def test_the_limit_of_digits(spaces: bytes) -> None:
    assert read_json(b'{"a": -%b}' % (b"9" * 4000) + spaces) == {"a": 1 - 10**4000}
    with pytest.raises(ApiError, match="an integer of hundreds of digits or more"):
        read_json(b'{"a": -%b}' % (b"9" * 5000) + spaces)


def nested(depth: int) -> bytes:
    return b'{"a": ' * depth + b"1" + b"}" * depth


def test_the_limit_of_nesting() -> None:
    assert read_json(nested(MAX_NESTING))
    for depth in (MAX_NESTING + 1, 500, 5_000, 60_000):
        with pytest.raises(ApiError, match="nested more than 64 deep"):
            read_json(nested(depth))


@pytest.mark.parametrize(
    ("item", "limit", "what"),
    [
        (b"1", MAX_VALUES, "values"),
        (b'""', MAX_STRINGS - 1, "strings"),
        (b"[]", MAX_CONTAINERS - 2, "arrays and objects"),
        (b"{}", MAX_CONTAINERS - 2, "arrays and objects"),
        (b"1.5", MAX_FRACTIONS, "fractions, exponents and truth values"),
        (b"1E2", MAX_FRACTIONS, "fractions, exponents and truth values"),
        (b"true", MAX_FRACTIONS, "fractions, exponents and truth values"),
        (b'"\\\\", "\\""', (MAX_STRINGS - 1) // 2, "strings"),
    ],
)
def test_the_limits_of_counts(item: bytes, limit: int, what: str) -> None:
    """The object and its list are containers too, and its key is a string."""
    assert len(read_json(b'{"a":[' + b",".join([item] * limit) + b"]}")["a"]) in (limit, 2 * limit)
    with pytest.raises(ApiError, match=rf"holds \d+ {what}; no request may have more than \d+"):
        read_json(b'{"a":[' + b",".join([item] * (limit + 2)) + b"]}")


@pytest.mark.parametrize("text", ['say: "[{,}]"\\', '\\"', "[", "{", ",", "\\\\", '"', "e.E"])
def test_what_looks_like_json_in_a_text_is_text(text: str) -> None:
    value = {"a": text * MAX_VALUES, "b": [text] * 100}
    assert read_json(json.dumps(value).encode()) == value


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert read_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


def test_escapes_that_only_look_like_surrogates_are_text() -> None:
    assert read_json(b'{"a": "\\\\ud83d"}') == {"a": "\\ud83d"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"a": {"b": ["x", "\\udead"]}}', "a.b[1]"),
        (b'{"a": [{"\\ud800": 1}]}', "a[0]"),
        (b'{"\\ud800": 1}', None),
        (b'{"a": "\\ude00\\ud83d"}', "a"),
    ],
)
def test_where_half_a_pair_stands(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError, match="lone surrogate") as caught:
        read_json(body)
    assert caught.value.param == param
