"""Every way to be refused has one form, the right status, and does nothing to the engine."""

import json
from typing import Any

import pytest

from fixtures.api_server import ApiServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RESPONSES = "/v1/responses"
HALF_AN_EMOJI = b'"\\ud83d"'
DEEP = b"[" * 100 + b"]" * 100
VERY_DEEP = b"[" * 100_000

# name, path, raw body, the param of the error
BAD_BODIES: list[tuple[str, str, bytes, str | None]] = [
    ("empty", TEXT, b"", None),
    ("blank", TEXT, b"  ", None),
    ("no JSON", TEXT, b"prompt=hello", None),
    ("cut off", TEXT, b'{"prompt": "hel', None),
    ("trailing comma", TEXT, b'{"prompt": "L",}', None),
    ("two values", TEXT, b'{"prompt": "L"} {}', None),
    ("an array", TEXT, b'["L"]', None),
    ("a string", TEXT, b'"L"', None),
    ("null", TEXT, b"null", None),
    ("a number", TEXT, b"12", None),
    ("NaN", TEXT, b'{"prompt": "L", "temperature": NaN}', None),
    ("infinity", TEXT, b'{"prompt": "L", "temperature": Infinity}', None),
    ("minus infinity", TEXT, b'{"prompt": "L", "temperature": -Infinity}', None),
    ("beyond a float", TEXT, b'{"prompt": "L", "temperature": 1e999}', "temperature"),
    ("a long integer", TEXT, b'{"prompt": "L", "seed": 1' + b"0" * 6000 + b"}", None),
    ("beyond 64 bits", TEXT, b'{"prompt": "L", "seed": 99999999999999999999999}', "seed"),
    ("huge top_k", TEXT, b'{"prompt": "L", "max_tokens": -99999999999999999999999}', "max_tokens"),
    ("max_tokens beyond 64 bits and not whole", TEXT, b'{"prompt": "L", "max_tokens": 1e30}', "max_tokens"),
    (
        "beyond a float in a template's variable",
        CHAT,
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": [1e999]}}',
        "chat_template_kwargs.a[0]",
    ),
    ("deep", TEXT, b'{"prompt": ' + DEEP + b"}", None),
    ("deeper than the parser", TEXT, b'{"prompt": ' + VERY_DEEP, None),
    ("a key twice", TEXT, b'{"prompt": "L", "n": 1, "n": 2}', "n"),
    ("a key twice below", CHAT, b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "role"),
    ("not UTF-8", TEXT, b'{"prompt": "\xff"}', None),
    ("UTF-16", TEXT, '{"prompt": "L"}'.encode("utf-16"), None),
    ("a byte order mark", TEXT, b'\xef\xbb\xbf{"prompt": "L"}', None),
    ("half an emoji in a prompt", TEXT, b'{"prompt": ' + HALF_AN_EMOJI + b"}", "prompt"),
    ("half an emoji in a stop", TEXT, b'{"prompt": "L", "stop": ["a", ' + HALF_AN_EMOJI + b"]}", "stop[1]"),
    (
        "half an emoji in a message",
        CHAT,
        b'{"messages": [{"role": "user", "content": ' + HALF_AN_EMOJI + b"}]}",
        "messages[0].content",
    ),
    ("half an emoji in a tool", CHAT, b'{"messages": [], "tools": [{"x": ' + HALF_AN_EMOJI + b"}]}", "tools[0].x"),
    ("half an emoji in a key", CHAT, b'{"messages": [], ' + HALF_AN_EMOJI + b": 1}", None),
    ("half an emoji in an input", RESPONSES, b'{"input": ' + HALF_AN_EMOJI + b"}", "input"),
]

# name, path, fields, the param of the error
BAD_FIELDS: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("no prompt", TEXT, {}, "prompt"),
    ("no messages", CHAT, {}, "messages"),
    ("no input", RESPONSES, {}, "input"),
    ("prompt of a wrong type", TEXT, {"prompt": 5}, "prompt"),
    ("prompt is an object", TEXT, {"prompt": {"prompt": "L"}}, "prompt"),
    ("mixed prompts", TEXT, {"prompt": ["L", [76]]}, "prompt[1]"),
    ("prompt holds objects", TEXT, {"prompt": [{"prompt": "L"}]}, "prompt[0]"),
    ("messages of a wrong type", CHAT, {"messages": "hello"}, "messages"),
    ("no message", CHAT, {"messages": []}, "messages"),
    ("a message of a wrong type", CHAT, {"messages": ["hello"]}, "messages[0]"),
    ("an unknown role", CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("no content", CHAT, {"messages": [{"role": "user"}]}, "messages[0]"),
    ("an unknown field", TEXT, {"prompt": "L", "temprature": 1}, "temprature"),
    (
        "an unknown option of a stream",
        CHAT,
        {"messages": [], "stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
    ),
    ("a number as a string", TEXT, {"prompt": "L", "max_tokens": "5"}, "max_tokens"),
    ("a fraction of a token", TEXT, {"prompt": "L", "max_tokens": 1.5}, "max_tokens"),
    ("true tokens", TEXT, {"prompt": "L", "max_tokens": True}, "max_tokens"),
    ("negative max_tokens", TEXT, {"prompt": "L", "max_tokens": -1}, "max_tokens"),
    (
        "negative max_completion_tokens",
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": -1},
        "max_completion_tokens",
    ),
    ("negative max_output_tokens", RESPONSES, {"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
    ("stream of a wrong type", TEXT, {"prompt": "L", "stream": "yes"}, "stream"),
    ("prompt log-probs in a stream", TEXT, {"prompt": "L", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("options of no stream", TEXT, {"prompt": "L", "stream_options": {"include_usage": True}}, "stream_options"),
    ("no choice", TEXT, {"prompt": "L", "n": 0}, "n"),
    ("too many choices", TEXT, {"prompt": "L", "n": 129}, "n"),
    ("too many choices of prompts", TEXT, {"prompt": ["L"] * 1000, "n": 3}, "prompt"),
    ("best of more", TEXT, {"prompt": "L", "best_of": 2}, "best_of"),
    ("a suffix", TEXT, {"prompt": "L", "suffix": "end"}, "suffix"),
    ("too many log-probs", TEXT, {"prompt": "L", "logprobs": 21}, "logprobs"),
    ("negative log-probs", TEXT, {"prompt": "L", "logprobs": -1}, "logprobs"),
    ("an empty stop", TEXT, {"prompt": "L", "stop": ""}, "stop"),
    ("a stop of a wrong type", TEXT, {"prompt": "L", "stop": 3}, "stop"),
    ("17 stops", TEXT, {"prompt": "L", "stop": [str(i) for i in range(17)]}, "stop"),
    ("min_tokens above max_tokens", TEXT, {"prompt": "L", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ("an empty bad word", TEXT, {"prompt": "L", "bad_words": [""]}, "bad_words"),
    ("metadata of numbers", TEXT, {"prompt": "L", "metadata": {"a": 1}}, "metadata.a"),
    ("tools", CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools"),
    (
        "a required tool",
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
        "tool_choice",
    ),
    ("functions", CHAT, {"messages": [], "functions": [{"name": "f"}]}, "functions"),
    ("JSON as a format", CHAT, {"messages": [], "response_format": {"type": "json_object"}}, "response_format.type"),
    ("XML as a format", CHAT, {"messages": [], "response_format": {"type": "xml"}}, "response_format.type"),
    ("a template", CHAT, {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template"),
    (
        "an image",
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ("sound", CHAT, {"messages": [], "modalities": ["text", "audio"]}, "modalities"),
    ("audio", CHAT, {"messages": [], "audio": {"voice": "x"}}, "audio"),
    (
        "both ends",
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    (
        "a variable that is ours",
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs",
    ),
    ("two limits", CHAT, {"messages": [], "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ("storing", CHAT, {"messages": [], "store": True}, "store"),
    ("another tier", CHAT, {"messages": [], "service_tier": "flex"}, "service_tier"),
    ("storing a response", RESPONSES, {"input": "x", "store": True}, "store"),
    ("in the background", RESPONSES, {"input": "x", "background": True}, "background"),
    ("going on", RESPONSES, {"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("a tool of a response", RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
    (
        "an image of a response",
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ("a call of a response", RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].type"),
    ("JSON of a response", RESPONSES, {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format.type"),
    ("thinking", RESPONSES, {"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
    ("encrypted thoughts", RESPONSES, {"input": "x", "include": ["reasoning.encrypted_content"]}, "include[0]"),
    ("neither prompt nor messages", "/tokenize", {}, "prompt"),
    ("prompt and messages", "/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ("ids that are none", "/detokenize", {"tokens": [1, 320]}, "tokens[1]"),
    ("a negative id", "/detokenize", {"tokens": [-1]}, "tokens[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), [case[1:] for case in BAD_BODIES], ids=[c[0] for c in BAD_BODIES])
def test_c53_bad_bodies(server: ApiServer, path: str, body: bytes, param: str | None) -> None:
    reply = server.request("POST", path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    server.assert_serves()


@pytest.mark.parametrize(("path", "fields", "param"), [case[1:] for case in BAD_FIELDS], ids=[c[0] for c in BAD_FIELDS])
def test_c53_bad_fields(server: ApiServer, path: str, fields: dict[str, Any], param: str | None) -> None:
    reply = server.post(path, **fields)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    server.assert_serves()


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_c53_other_content_types(server: ApiServer, content_type: str | None) -> None:
    reply = server.request("POST", TEXT, b'{"prompt": "L"}', content_type=content_type)
    assert reply.status == 400
    assert "content type" in reply.error["message"]
    server.assert_serves()


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/a+json"])
def test_c53_right_content_types(server: ApiServer, content_type: str) -> None:
    body = json.dumps({"prompt": "L", "max_tokens": 1}).encode()
    assert server.request("POST", TEXT, body, content_type=content_type).status == 200


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, "/tokenize", "/detokenize"])
def test_c53_get_on_a_route_that_takes_posts(server: ApiServer, path: str) -> None:
    reply = server.get(path)
    assert reply.status == 405
    assert reply.headers["allow"] == "POST"
    assert reply.error["code"] == "method_not_allowed"
    server.assert_serves()


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/completions/", "/v1//completions", "/V1/completions", "/v1/embeddings"]
)
def test_an_unknown_route(server: ApiServer, path: str) -> None:
    reply = server.post(path, prompt="L")
    assert reply.status == 404
    assert reply.error["code"] == "not_found"


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, "/tokenize", "/detokenize"])
def test_c53_an_unknown_model(server: ApiServer, path: str) -> None:
    fields = {
        TEXT: {"prompt": "L"},
        CHAT: {"messages": [{"role": "user", "content": "x"}]},
        RESPONSES: {"input": "x"},
        "/tokenize": {"prompt": "L"},
        "/detokenize": {"tokens": [1]},
    }[path]
    reply = server.post(path, model="gpt-99", **fields)
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"
    assert reply.error["param"] == "model"
    server.assert_serves()


def test_c53_null_is_as_good_as_absent(server: ApiServer) -> None:
    names = [
        "model",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "skip_special_tokens",
        "stream",
        "stream_options",
        "echo",
        "best_of",
        "suffix",
        "user",
        "metadata",
        "service_tier",
        "store",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
    ]
    nulls = server.ok(
        TEXT,
        prompt="P",
        **dict.fromkeys(names),
    )
    assert nulls["choices"] == server.ok(TEXT, prompt="P")["choices"]


def test_a_clients_value_is_cut_short_and_escaped(server: ApiServer) -> None:
    long = "x" * 100_000
    for fields in ({"prompt": "L", "model": long}, {"prompt": "L", long: 1}, {"prompt": "L", "stop": [long]}):
        reply = server.post(TEXT, **fields)
        assert reply.status in (400, 404)
        assert len(reply.raw) < 1000
        assert reply.error["message"]
    reply = server.post(TEXT, prompt="L", model="a\nb\x1b[31m<script>")
    assert "\n" not in reply.error["message"]
    assert "\x1b" not in reply.error["message"]
    server.assert_serves()


def test_a_request_that_fails_on_the_engine_is_the_servers_fault(server: ApiServer) -> None:
    reply = server.post(TEXT, prompt="!", max_tokens=3)
    assert reply.status == 500
    assert reply.error["type"] == "server_error"
    assert "not finite" in reply.error["message"]
    server.assert_serves()


def test_an_error_in_a_stream_is_its_last_event(server: ApiServer) -> None:
    [error] = server.stream(TEXT, prompt="!", max_tokens=3)
    assert set(error) == {"error"}
    assert error["error"]["type"] == "server_error"
    assert "not finite" in error["error"]["message"]
    server.assert_serves()
