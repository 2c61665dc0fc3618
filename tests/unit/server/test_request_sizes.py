"""A short request must not stand for a large one: what is long is refused before it costs anything."""

import json
from typing import Any

import pytest

from fixtures.api_server import ApiServer
from gapless.errors import shown
from gapless.server.endpoints.answering import MAX_IDS_IN_ALL, MAX_RATED_IN_ALL
from gapless.server.error_bodies import ApiError
from gapless.server.http_framing import MAX_HEAD_BYTES, read_head
from gapless.server.json_bodies import MAX_FIELDS, MAX_KEYS, read_json

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BEYOND_64_BITS = 10**30


@pytest.mark.timeout(10)  # with a pattern that tries every end of the white space it would take a minute
def test_white_space_in_a_header_costs_no_time() -> None:
    for space in (b" ", b"\t"):
        value = b"x" + space * (MAX_HEAD_BYTES - 100) + b"y"
        assert read_head(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + value + b"\r\n\r\n", max_body_bytes=0).length == 0


def test_white_space_around_a_length_is_no_part_of_it() -> None:
    head = b"POST / HTTP/1.1\r\nHost:a\r\nContent-Length: \t 5 \t \r\n\r\n"
    assert read_head(head, max_body_bytes=10).length == 5


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": "L", "max_tokens": BEYOND_64_BITS, "temperature": 0}),
        (TEXT, {"prompt": "L", "max_tokens": 2, "top_k": BEYOND_64_BITS}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": BEYOND_64_BITS}),
        (RESPONSES, {"input": "x", "max_output_tokens": BEYOND_64_BITS}),
    ],
    ids=["max_tokens", "top_k", "max_completion_tokens", "max_output_tokens"],
)
def test_limits_beyond_64_bits_are_as_good_as_none(server: ApiServer, path: str, fields: dict[str, Any]) -> None:
    assert server.post(path, **fields).status == 200


def test_a_least_number_of_tokens_beyond_64_bits(server: ApiServer) -> None:
    reply = server.post(TEXT, prompt="Q", temperature=0, min_tokens=BEYOND_64_BITS, max_tokens=BEYOND_64_BITS)
    assert reply.status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": ["word"] * 100_000}, "bad_words"),
        ({"bad_words": ["a" * 500_000]}, "bad_words[0]"),
        ({"stop_token_ids": [1] * 100_000}, "stop_token_ids"),
        ({"allowed_token_ids": [1] * 100_000}, "allowed_token_ids"),
        ({"allowed_token_ids": ["1"] * 60_000}, "allowed_token_ids[0]"),
        ({"prompt": [[1]] * 60_000}, "prompt"),
        ({"prompt": [1] * 100_000}, "prompt"),
        ({"prompt": ["L", [1]]}, "prompt[1]"),
        ({"prompt": ["L"] * 128, "n": 17}, "prompt"),
        ({"prompt": ["L"] * 2000, "allowed_token_ids": [1] * (MAX_IDS_IN_ALL // 2000 + 1)}, "allowed_token_ids"),
    ],
)
def test_long_lists_are_refused_by_name(server: ApiServer, fields: dict[str, Any], param: str) -> None:
    reply = server.post(TEXT, **{"prompt": "L", **fields})
    assert reply.status == 400
    assert reply.error["param"] == param
    assert len(reply.error["message"]) < 400


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_of_prompts_are_bounded_over_the_whole_answer(server: ApiServer, stream: bool) -> None:
    prompt = "L" * 60
    each = len(prompt) * 21
    most = MAX_RATED_IN_ALL // (each * 128)
    fields = {"n": 128, "echo": True, "logprobs": 20, "max_tokens": 0, "stream": stream}
    reply = server.post(TEXT, prompt=[prompt] * (most + 1), **fields)
    assert reply.status == 400
    assert f"at most {MAX_RATED_IN_ALL}" in reply.error["message"]
    server.wait_until_idle()
    server.assert_serves()


def test_log_probs_of_prompts_below_the_limit_are_given(server: ApiServer) -> None:
    answer = server.ok(TEXT, prompt=["Lxy", "LL"], n=2, echo=True, logprobs=1, max_tokens=0)
    assert [choice["text"] for choice in answer["choices"]] == ["Lxy", "Lxy", "LL", "LL"]
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [3, 3, 2, 2]


def test_bad_words_hold_for_every_prompt(server: ApiServer) -> None:
    answer = server.ok(TEXT, prompt=["L"] * 40, bad_words=["x", "y"], max_tokens=1)
    assert {choice["text"] for choice in answer["choices"]} == {"z"}


def test_an_object_with_too_many_keys_is_refused() -> None:
    fits = {f"k{i}": 1 for i in range(MAX_KEYS)}
    assert read_json(json.dumps({"a": fits}).encode()) == {"a": fits}
    with pytest.raises(ApiError, match=f"the limit is {MAX_KEYS}"):
        read_json(json.dumps({"a": {**fits, "more": 1}}).encode())
    with pytest.raises(ApiError, match=f"more than {MAX_FIELDS}"):
        read_json(json.dumps({f"k{i}": 1 for i in range(MAX_FIELDS + 1)}).encode())


def test_what_is_shown_of_a_value_is_its_beginning() -> None:
    for value in ([1] * 1000, "a" * 1000, {"a": ["b" * 1000]}, ("x",) * 1000, b"a" * 1000, [{"k" * 200: 1}]):
        assert shown(value) == repr(value)[:77] + "..."
    for value in ([], {}, (), [1, "a", {"b": (None, 2.5)}], "", (1,), "a" * 78):
        assert shown(value) == repr(value)
    nested: list[Any] = []
    for _ in range(50_000):
        nested = [nested]
    assert shown(nested) == "[" * 77 + "..."
