"""Requests that nobody should send: :func:`hostile_requests`, several hundred of them, each of which must be refused.

Bodies that are no JSON or far too deep or long, values of every wrong type and size in every field, bombs for the
template engine, tokenizer and sampler, and heads that lie. What is refused is refused with 4xx and the error object;
the engine never notices. :func:`requests_naming` has those that ask the server to fetch something.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gapless.server.json_bodies import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES

__all__ = ["HostileRequest", "hostile_requests", "requests_naming"]

CHAT, COMPLETIONS, RESPONSES, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"
HUGE = 10**30
LONE = "\ud83d"


@dataclass(frozen=True, kw_only=True)
class HostileRequest:
    """One of them; ``body`` is sent as it is."""

    name: str
    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def hostile_requests() -> dict[str, list[HostileRequest]]:
    """All of them by kind, in a fixed order; no two have the same name."""
    found = {
        "bodies": list(_bodies()),
        "values": list(_wrong_values()),
        "messages": list(_wrong_messages()),
        "templates": list(_template_bombs()),
        "sizes": list(_sizes()),
        "bodies as long as they may be": list(_longest_bodies()),
        "targets": list(_targets()),
    }
    names = [request.name for requests in found.values() for request in requests]
    assert len(set(names)) == len(names)
    return found


def _request(name: str, path: str, body: Any, **more: Any) -> HostileRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HostileRequest(name=f"{path} {name}", path=path, body=raw, **more)


def _valid(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    if path == RESPONSES:
        return {"input": "hi", "max_output_tokens": 2}
    return {"prompt": "hi", "max_tokens": 2} if path == COMPLETIONS else {"prompt": "hi"}


def _bodies() -> Iterator[HostileRequest]:
    """What is no JSON object, or one that no parser should be let into."""
    bodies: dict[str, bytes] = {
        "empty": b"",
        "spaces": b" " * 1_000_000,
        "a word": b"hello",
        "half an object": b'{"prompt": "hi"',
        "an object and more": b'{"prompt": "hi"} {}',
        "trailing comma": b'{"prompt": "hi",}',
        "single quotes": b"{'prompt': 'hi'}",
        "a list": b'["prompt"]',
        "a text": b'"prompt"',
        "a number": b"12",
        "null": b"null",
        "NaN": b'{"prompt": "hi", "messages": [], "temperature": NaN}',
        "Infinity": b'{"prompt": "hi", "messages": [], "temperature": Infinity}',
        "a number of a thousand digits": b'{"prompt": "hi", "input": "hi", "max_tokens": ' + b"9" * 1000 + b"}",
        "a number of a million digits": b'{"prompt": "hi", "max_tokens": ' + b"9" * 1_000_000 + b"}",
        "an exponent beyond all": b'{"prompt": "hi", "temperature": 1e99999}',
        "no UTF-8": b'{"prompt": "\xff\xfe"}',
        "an overlong NUL": b'{"prompt": "\xc0\x80"}',
        "UTF-16": '{"prompt": "hi"}'.encode("utf-16"),
        "UTF-8 surrogates": b'{"prompt": "\xed\xa0\x80"}',
        "raw NUL in a text": b'{"prompt": "a\x00b"}',
        "raw line break in a text": b'{"prompt": "a\nb"}',
        "lists 100,000 deep": b'{"prompt": ' + b"[" * 100_000,
        "closed lists 100,000 deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "objects 100,000 deep": b'{"prompt": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        "lists 900 deep": b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}",
        "200,000 unknown fields": b'{"' + b'":1,"'.join(b"f%d" % number for number in range(200_000)) + b'":1}',
        "compressed": gzip.compress(b'{"prompt": "hi"}'),
        "a form": b"prompt=hi&max_tokens=2",
        "multipart": b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nhi\r\n--x--\r\n',
    }
    for path in (CHAT, COMPLETIONS, RESPONSES, TOKENIZE):
        for name, body in bodies.items():
            yield _request(f"body: {name}", path, body)
    types = ("text/plain", "application/xml", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded")
    for kind in types:
        for path in (CHAT, COMPLETIONS):
            yield _request(f"content type {kind}", path, b"hello", headers={"Content-Type": kind})
    bomb = gzip.compress(bytes(10_000_000))
    yield _request("gzip bomb", CHAT, bomb, headers={"Content-Encoding": "gzip"})
    yield _request("too long", COMPLETIONS, b'{"prompt": "' + b"a" * (9 << 20) + b'"}')


def _wrong_values() -> Iterator[HostileRequest]:
    """Values that each field cannot have."""
    numbers = ["x", [], {}, True]
    wrong: dict[str, list[Any]] = {
        "temperature": [*numbers, -1, "0.5x"],
        "top_p": [*numbers, -0.1, 1.1, 0, HUGE],
        "top_k": [*numbers, -2, 1.5],
        "min_p": [*numbers, -0.1, 1.5],
        "presence_penalty": [*numbers, 2.5, -2.5, HUGE],
        "frequency_penalty": [*numbers, 2.5, -2.5],
        "repetition_penalty": [*numbers, 0, -1],
        "seed": ["x", [], {}, 1.5, HUGE, -HUGE],
        "n": [*numbers, 0, -1, 1.5, HUGE, 1_000_000],
        "min_tokens": [*numbers, -1, HUGE, 1_000_000],
        "max_tokens": [*numbers, -1, 1.5],
        "stop": [1, {}, [1], [[]], [""], ["a"] * 10_000, "a" * 2_000_000, LONE, [None]],
        "stop_token_ids": [1, "x", [-1], [1.5], [HUGE], ["a"], {}],
        "logit_bias": [
            *(1, "x", [], {"a": 1}, {"-1": 1}, {"1": "x"}, {"1": None}, {"1": [1]}, {"99999999": 1}),
            {str(HUGE): 1},
            {"1": 1e400},
        ],
        "allowed_token_ids": [1, "x", [], [-1], [99_999_999], [HUGE], ["x"]],
        "bad_words": [1, [1], [""], {}, [LONE]],
        "stream": ["x", 2, [], {}],
        "stream_options": [1, "x", [], {"include_usage": "x"}],
        "ignore_eos": ["x", 2, [], {}],
        "skip_special_tokens": ["x", 2, [], {}],
        "model": [1, [], {}, "no-such-model", "../../etc/passwd", "a" * 100_000, LONE],
        "response_format": [1, "x", [], {"type": "xml"}, {"type": 1}],
    }
    for path in (COMPLETIONS, CHAT):
        for name, values in wrong.items():
            for number, value in enumerate(values):
                yield _request(f"{name} {number}", path, {**_valid(path), name: value})
    only_completions: dict[str, list[Any]] = {
        "prompt": [
            *(
                None,
                1,
                True,
                {},
                [],
                [[]],
                [""] * 3 + [1],
                [-1],
                [1.5],
                [HUGE],
                [99_999_999],
                [[1], "a"],
                [[[1]]],
                LONE,
            ),
            [0] * 100_000,
            "word " * 200_000,
            [[1]] * 100_000,
        ],
        "logprobs": [*numbers, -1, 10_000, HUGE],
        "best_of": [*numbers, 0, HUGE],
        "echo": ["x", 2, []],
        "suffix": ["x", 1, []],
    }
    for name, values in only_completions.items():
        for number, value in enumerate(values):
            yield _request(f"{name} {number}", COMPLETIONS, {**_valid(COMPLETIONS), name: value})
    for number, value in enumerate([*numbers, -1, 10_000, HUGE]):
        yield _request(f"top_logprobs {number}", CHAT, {**_valid(CHAT), "logprobs": True, "top_logprobs": value})


def _wrong_messages() -> Iterator[HostileRequest]:
    """Conversations that are none."""
    wrong: list[Any] = [
        *(None, 1, "hi", {}, [], [1], ["hi"], [None], [[]], [{}]),
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "wizard", "content": "hi"}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user", "content": 1}],
        [{"role": "user", "content": {}}],
        [{"role": "user", "content": [1]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 1}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/secret"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]}],
        [{"role": "user", "content": [{"type": "hologram"}]}],
        [{"role": "user", "content": LONE}],
        [{"role": "user", "content": "a" * 2_000_000}],
        [{"role": LONE, "content": "hi"}],
        [{"role": "user", "content": "hi"}] * 20_000,
    ]
    for number, messages in enumerate(wrong):
        yield _request(f"messages {number}", CHAT, {"messages": messages, "max_tokens": 2})
    for number, given in enumerate([None, 1, {}, [1], [[]], [{"type": "x"}], [{"role": "x", "content": "hi"}], LONE]):
        yield _request(f"input {number}", RESPONSES, {"input": given, "max_output_tokens": 2})


def _template_bombs() -> Iterator[HostileRequest]:
    """What should make a template run for ever, reach files, or nest without end."""
    deep: Any = "x"
    for _ in range(400):
        deep = {"a": deep}
    endless, escape = "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}"
    for number, template in enumerate([endless, escape, "{% include '/etc/passwd' %}", "{% for", 1, [], LONE]):
        yield _request(f"chat_template {number}", CHAT, {**_valid(CHAT), "chat_template": template})
    for number, arguments in enumerate([1, "x", [], {"messages": []}, {"a": deep}, {LONE: 1}]):
        yield _request(f"chat_template_kwargs {number}", CHAT, {**_valid(CHAT), "chat_template_kwargs": arguments})
    for number, tools in enumerate([1, "x", {}, [1], ["x"], [{"type": "rocket"}], [deep]]):
        yield _request(f"tools {number}", CHAT, {**_valid(CHAT), "tools": tools})


def _sizes() -> Iterator[HostileRequest]:
    """Much of what is allowed in small."""
    base = _valid(COMPLETIONS)
    much = {
        "300,000 logit biases": {**base, "logit_bias": {str(number): 1 for number in range(300_000)}},
        "many choices of many prompts": {**base, "prompt": ["a"] * 5_000, "n": 1_000},
        "a longer answer than fits": {"prompt": "word " * 3000, "max_tokens": 10**9},
        "long bad words": {**base, "bad_words": ["a" * 500_000] * 4},
        "many stop ids": {**base, "stop_token_ids": [10**7] * 200_000},
    }
    for name, body in much.items():
        yield _request(name, COMPLETIONS, body)


def _longest_bodies() -> Iterator[HostileRequest]:
    """Just below what is read at all: each takes the parser, the tokenizer or the checks as long as a body can."""
    size = (8 << 20) - 500
    texts = {
        "one word": b"a" * size,
        "many words": b"word " * (size // 5),
        "escapes": b"\\u0061" * (size // 6),
        "four-byte characters": "\N{GRINNING FACE}".encode() * (size // 4),
        "one four-byte character": b"a" * size + "\N{GRINNING FACE}".encode(),
        "a lone surrogate at the end": b"a" * size + b"\\ud83d",
        "control text": b"<|im_end|>" * (size // 10),
        "escaped quotes": b'\\"' * (size // 2),
        "brackets": b"[" * size,
    }
    for name, text in texts.items():
        yield _request(f"text: {name}", COMPLETIONS, b'{"prompt": "%b"}' % text)
        yield _request(f"content: {name}", CHAT, b'{"messages": [{"role": "user", "content": "%b"}]}' % text)
    yield _request("key", COMPLETIONS, b'{"prompt": "hi", "%b": 1}' % texts["one word"])
    yield _request("role", CHAT, b'{"messages": [{"content": "hi", "role": "%b"}]}' % texts["one word"])
    lists = {
        "a million ids": [b"1"] * (MAX_VALUES - 8),
        "a million larger ids": [b"1234567"] * (MAX_VALUES - 8),
        "a million fractions": [b"1e300"] * (MAX_VALUES - 8),
        "long numbers": [b"9" * 4000] * 2000,
        "lists of ids": [b"[" + b"1," * 14 + b"1]"] * (MAX_CONTAINERS - 8),
        "objects": [b'{"a":1}'] * (MAX_CONTAINERS - 8),
        "texts": [b'"a"'] * (MAX_STRINGS - 8),
    }
    for name, items in lists.items():
        values = b",".join(items)
        yield _request(f"prompt: {name}", COMPLETIONS, b'{"prompt": [%b]}' % values)
        yield _request(f"messages: {name}", CHAT, b'{"messages": [%b]}' % values)
        yield _request(f"bad_words: {name}", COMPLETIONS, b'{"prompt": "hi", "bad_words": [[1], %b]}' % values)


def requests_naming(url: str) -> dict[str, list[HostileRequest]]:
    """Requests with an address in them, by the field that is refused for it; those under ``""`` are answered."""
    parts = {
        "messages[0].content[0]": [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image_url", "image_url": url},
            {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
            {"type": "video_url", "video_url": {"url": url}},
            {"type": "file", "file": {"file_id": url}},
            {"type": "file", "file": {"file_data": url, "filename": url}},
        ],
        "input[0].content[0].type": [
            {"type": "input_image", "image_url": url},
            {"type": "input_file", "file_url": url},
            {"type": "input_file", "file_id": url},
        ],
    }
    function = {"type": "function", "function": {"name": "f", "parameters": {"$ref": url}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": url}}}
    fields: list[tuple[str, str, dict[str, Any]]] = [
        *((CHAT, "tools", {"tools": [tool]}) for tool in (function, {"type": "mcp", "server_url": url})),
        (CHAT, "response_format", {"response_format": schema}),
        *((CHAT, name, {name: url}) for name in ("model", "chat_template", "tool_choice", "audio", "prediction")),
        *((CHAT, name, {name: {"url": url}}) for name in ("web_search_options", "function_call", "audio")),
        (CHAT, "functions", {"functions": [{"name": "f", "parameters": {"$ref": url}}]}),
        *((COMPLETIONS, name, {name: url}) for name in ("model", "suffix")),
        (COMPLETIONS, "prompt", {"prompt": {"url": url}}),
        *((RESPONSES, name, {name: url}) for name in ("previous_response_id", "conversation", "model")),
        (RESPONSES, "prompt", {"prompt": {"id": url}}),
        (RESPONSES, "tools", {"tools": [{"type": "mcp", "server_label": "s", "server_url": url}]}),
        (RESPONSES, "text", {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"$ref": url}}}}),
        (CHAT, "image_url", {"image_url": url}),
        (CHAT, "", {"user": url, "metadata": {"url": url}, "stop": url, "chat_template_kwargs": {"url": url}}),
        (CHAT, "", {"messages": [{"role": "user", "content": url, "name": url, "image_url": url}]}),
        (COMPLETIONS, "", {"prompt": url, "user": url, "cache_salt": url, "bad_words": [url[:16]]}),
        (RESPONSES, "", {"input": url, "instructions": url, "metadata": {"url": url}}),
    ]
    for place, found in parts.items():
        for part in found:
            message = {"role": "user", "content": [part]}
            path, name = (CHAT, "messages") if place.startswith("messages") else (RESPONSES, "input")
            fields.append((path, place, {name: [message]}))
    requests: dict[str, list[HostileRequest]] = {}
    for number, (path, place, values) in enumerate(fields):
        requests.setdefault(place, []).append(_request(f"{number} {place}", path, {**_valid(path), **values}))
    return requests


def _targets() -> Iterator[HostileRequest]:
    """Paths, methods and hosts."""
    paths = ["/", "//", "/v1", "/v1/", "/v2/models", "/v1/models/no-such-model", "/v1/models/..%2f..%2fetc%2fpasswd"]
    paths += ["/%00", "/%", "/%zz", "/v1/chat/completions/", "//v1/chat/completions", "/v1/CHAT/completions", "/.env"]
    paths += [
        "/" + "a" * 10_000,
        "/v1/models/" + "%f0%9f%98%80" * 500,
        "/..%c0%af..%c0%afetc",
        "/x?" + "a=b&" * 4000,
    ]
    for path in paths:
        yield HostileRequest(name=f"GET {path[:60]}", path=path, body=b"", method="GET")
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        for path in (CHAT, COMPLETIONS):
            yield HostileRequest(name=f"{method} {path}", path=path, body=b"", method=method)
    for host in ("evil.example", "127.0.0.1.evil.example", "", "a" * 5000, "127.0.0.1@evil", "\xff"):
        headers = {"Host": host}
        yield HostileRequest(name=f"host {host[:40]}", path="/v1/models", body=b"", method="GET", headers=headers)
    yield _request("length too short", COMPLETIONS, b'{"prompt": "hi"}', headers={"Content-Length": "3"})
    yield _request("length in words", COMPLETIONS, b"{}", headers={"Content-Length": "two"})
    yield _request("length and chunks", COMPLETIONS, b"0\r\n\r\n", headers={"Transfer-Encoding": "chunked"})
    yield _request("a long header", COMPLETIONS, b"{}", headers={"X-Long": "a" * 100_000})
    yield _request("many headers", COMPLETIONS, b"{}", headers={f"X-{number}": "a" for number in range(200)})
