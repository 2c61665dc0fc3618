"""Checkpoints that are out of the ordinary, behind the API: half precision, several
EOS ids, several chat templates, one that is broken."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fixtures.api_server import ApiServer
from fixtures.served_models import ROW_L, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_BOS, BYTE_EOS, BYTE_IM_END, CHATML_WITH_BOS, save_byte_tokenizer

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
X, Y = -0.407606, -1.407606
# The first is the default. What a message asks for happens: sandboxed work, failing in the template's words or its own.
TEMPLATES = {
    "default": (
        "{% set wish = messages[-1].content %}"
        "{% if wish == 'internals' %}{{ ''.__class__.__mro__ }}"
        "{% elif wish == 'attribute' %}{{ (''|attr('__class__')).mro() }}"
        "{% elif wish == 'change' %}{{ messages.append(1) }}"
        "{% elif wish == 'divide' %}{{ 1 // 0 }}"
        "{% elif wish == 'undefined' %}{{ nothing.at.all }}"
        "{% elif wish == 'refuse' %}{{ raise_exception('Turns must alternate') }}"
        "{% elif wish == 'year' %}{{ strftime_now('%Y') | length }}{% for m in messages %}"
        "{% if loop.previtem is defined %}{{ loop.previtem | tojson }}{% endif %}{% endfor %}{{ '\n' }}"
        "{% else %}" + CHATML_WITH_BOS + "{% endif %}"
    ),
    "broken": "{% for message in messages %}{{ message.content }",
}


def user(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two EOS ids, a list of templates, a tokenizer that adds BOS. ``\\n`` leads to ``hi<|im_end|>more</s>SSS...``."""
    folder = table_checkpoint(
        tmp_path_factory.mktemp("unusual"),
        chain("\n", *"hi", BYTE_IM_END, *"more", BYTE_EOS, "S", "S"),
        rows(L=ROW_L),
        add_bos=True,
        eos_token_id=[BYTE_EOS, BYTE_IM_END],
    )
    named = [{"name": name, "template": template} for name, template in TEMPLATES.items()]
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": named}))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ApiServer]:
    with ApiServer(folder) as api:
        yield api


# --- half precision -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """ROW-L in half precision."""
    folder = table_checkpoint(tmp_path_factory.mktemp(request.param), rows(L=ROW_L))
    with ApiServer(folder, {"dtype": request.param}) as api:
        yield api


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4])
def test_c18_tiny_temperatures_in_half_precision(half: ApiServer, temperature: float) -> None:
    assert half.context is not None
    assert half.context.client.dtype in ("bfloat16", "float16")
    options = {"prompt": "L", "n": 50, "temperature": temperature, "max_tokens": 1, "logprobs": 2}
    choices = half.ok(TEXT, **options)["choices"]
    assert [choice["text"] for choice in choices] == ["x"] * 50
    for choice in choices:
        assert choice["logprobs"]["token_logprobs"] == [pytest.approx(X, abs=0.02)]
        [top] = choice["logprobs"]["top_logprobs"]
        assert top == {"x": pytest.approx(X, abs=0.02), "y": pytest.approx(Y, abs=0.02)}


def test_c18_values_that_are_no_temperature_in_half_precision(half: ApiServer) -> None:
    for value in (b"NaN", b"Infinity", b"-Infinity", b"-1", b"1e999"):
        reply = half.request("POST", TEXT, b'{"prompt": "L", "max_tokens": 1, "temperature": %b}' % value)
        assert reply.status == 400
        assert reply.error
        half.assert_serves()
    assert half.text("L", max_tokens=1, temperature=1, top_p=1e-4) == "x"


# --- ends ---------------------------------------------------------------------------------------------------------

# name, options, text without and with special tokens, tokens, finish_reason, stop_reason
ENDS: dict[str, tuple[dict[str, Any], str, str, int, str, int | str | None]] = {
    "EOS": ({}, "hi", "hi", 3, "stop", None),
    "text of a special token": (
        {"stop": ["nothing", "<|im_end|>"], "ignore_eos": True},
        *("hi", "hi", 3, "stop", "<|im_end|>"),
    ),
    "special id": ({"stop_token_ids": [BYTE_IM_END], "ignore_eos": True}, "hi", "hi", 3, "stop", BYTE_IM_END),
    "text": ({"stop": "or", "ignore_eos": True}, "him", "hi<|im_end|>m", 6, "stop", "or"),
    "ordinary id": (
        {"stop_token_ids": [1, ord("o")], "ignore_eos": True},
        *("him", "hi<|im_end|>m", 5, "stop", ord("o")),
    ),
    "text past EOS": ({"stop": "SS", "ignore_eos": True}, "himore", "hi<|im_end|>more</s>", 10, "stop", "SS"),
    "id past EOS": (
        {"stop_token_ids": [ord("S")], "ignore_eos": True},
        *("himore", "hi<|im_end|>more</s>", 9, "stop", ord("S")),
    ),
    "limit past EOS": ({"ignore_eos": True}, "himoreSSSS", "hi<|im_end|>more</s>SSSS", 12, "length", None),
}


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_c34_every_end_whole_and_streamed(server: ApiServer, end: str, skip: bool, path: str) -> None:
    fields, hidden, shown, num_tokens, finish_reason, stop_reason = ENDS[end]
    prompt = {"prompt": "\n"} if path == TEXT else {"messages": user("Hello")}
    options = {**prompt, **fields, "skip_special_tokens": skip, "max_tokens": 12, "temperature": 0}
    whole = server.ok(path, **options)
    [choice] = whole["choices"]
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    assert text == (hidden if skip else shown)
    assert (choice["finish_reason"], choice["stop_reason"]) == (finish_reason, stop_reason)
    assert whole["usage"]["completion_tokens"] == num_tokens

    *chunks, usage = server.stream(path, **options, stream_options={"include_usage": True})
    news = [chunk["choices"][0] for chunk in chunks]
    parts = [each["text"] if path == TEXT else each["delta"].get("content", "") for each in news]
    assert "".join(parts) == text
    assert [each["finish_reason"] for each in news] == [None] * (len(news) - 1) + [finish_reason]
    assert news[-1]["stop_reason"] == stop_reason
    assert usage["usage"]["completion_tokens"] == num_tokens


# --- templates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_c35_ids_are_those_of_transformers(server: ApiServer, tmp_path: Path, add_generation_prompt: bool) -> None:
    theirs = AutoTokenizer.from_pretrained(
        save_byte_tokenizer(tmp_path, add_bos=True, chat_template=TEMPLATES["default"])
    )
    messages = [
        {"role": "system", "content": "Be kind"},
        *user("Hi  there \N{GRINNING FACE}"),
        {"role": "assistant", "content": "\n é "},
        *user("bye"),
    ]
    ids = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert ids.count(BYTE_BOS) == 1
    options = {"messages": messages, "add_generation_prompt": add_generation_prompt}
    assert server.ok("/tokenize", **options)["tokens"] == ids
    chat = server.ok(CHAT, **options, max_tokens=1, prompt_logprobs=0)
    assert chat["usage"]["prompt_tokens"] == len(ids)
    assert seen_ids(chat["prompt_logprobs"]) == ids[1:]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    assert server.ok("/tokenize", prompt=rendered)["tokens"] == ids
    completion = server.complete(rendered, max_tokens=1, prompt_logprobs=0)
    assert completion["usage"]["prompt_tokens"] == len(ids)
    assert seen_ids(completion["choices"][0]["prompt_logprobs"]) == ids[1:]


def seen_ids(places: list[dict[str, Any] | None]) -> list[int]:
    """The prompt that the engine has seen, from the log-probs that it gave of it; the first token has none."""
    assert places[0] is None
    return [int(token) for place in places[1:] if place is not None for token in place]


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("refuse", "Turns must alternate"),
        ("internals", "SecurityError"),
        ("attribute", "SecurityError"),
        ("change", "SecurityError"),
        ("divide", "ZeroDivisionError"),
        ("undefined", "'nothing' is undefined"),
    ],
)
def test_c36_whatever_a_template_does_is_a_400(server: ApiServer, wish: str, words: str) -> None:
    for path, fields in (
        (CHAT, {"messages": user(wish)}),
        (CHAT, {"messages": user(wish), "stream": True}),
        ("/v1/responses", {"input": wish}),
        ("/v1/responses", {"input": wish, "stream": True}),
        ("/tokenize", {"messages": user(wish)}),
    ):
        reply = server.post(path, **fields)
        assert reply.status == 400
        assert words in reply.error["message"]
        assert reply.error["type"] == "invalid_request_error"
    assert server.chat("fine")["choices"][0]["message"]["content"] == "hi"
    server.assert_serves()


def test_c36_what_templates_may_use(server: ApiServer) -> None:
    tokens = server.ok("/tokenize", messages=user("one", "year"))["tokens"]
    assert bytes(tokens) == b'4{"role": "user", "content": "one"}\n'
    assert server.chat("year")["choices"][0]["message"]["content"] == "hi"


def test_c36_a_syntax_error_in_the_template_of_the_list_that_was_chosen(folder: Path) -> None:
    with ApiServer(folder, chat_template="broken") as server:
        for stream in (False, True):
            reply = server.post(CHAT, messages=user("x"), stream=stream)
            assert reply.status == 400
            assert "TemplateSyntaxError" in reply.error["message"]
            server.assert_serves()
