"""Every answer and every event is of the ``openai`` package's own types, strictly.

The client itself checks nothing: it builds its objects out of whatever comes, and an attribute is missing only when
somebody reads it.
"""

from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from fixtures.api_server import ApiServer, sse_events, strict_json

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
USAGE = {"include_usage": True}
MESSAGES = [{"role": "user", "content": "Hello"}]
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

OPTIONS: list[dict[str, Any]] = [{}, {"n": 3}, {"stop": "r"}, {"max_tokens": 0}, {"max_tokens": 2, "n": 2}]


def strictly(model: Any, content: Any) -> Any:
    """The content as an object of a type, nothing of it converted."""
    return TypeAdapter(model).validate_python(content, strict=True)


def said_alike(chunks: list[Any]) -> None:
    """What all chunks of a stream have in common, and how the usage comes."""
    for name in ("id", "created", "model", "object", "system_fingerprint"):
        assert len({chunk[name] for chunk in chunks}) == 1
    *parts, last = chunks
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in parts)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + last["usage"]["completion_tokens"]


@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3, "n": 2}])
def test_chats(server: ApiServer, options: dict[str, Any]) -> None:
    fields = {"messages": MESSAGES, "temperature": 0, **options}
    whole = server.ok(CHAT, **fields)
    strictly(ChatCompletion, whole)
    chunks = server.stream(CHAT, **fields, stream_options=USAGE)
    said_alike(chunks)
    of_choice: dict[int, list[Any]] = {}
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
        for choice in chunk["choices"]:
            of_choice.setdefault(choice["index"], []).append(choice)
    for index, (first, *parts, last) in of_choice.items():
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(part["delta"]) == {"content"} and part["finish_reason"] is None for part in parts)
        assert last["delta"] == {}
        assert last["logprobs"] is None
        expected = whole["choices"][index]
        assert last["finish_reason"] == expected["finish_reason"]
        assert last["stop_reason"] == expected["stop_reason"]
        assert "".join(part["delta"]["content"] for part in parts) == expected["message"]["content"]
        rated = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert rated == (expected["logprobs"]["content"] if options.get("logprobs") else [])
    assert sorted(of_choice) == list(range(options.get("n", 1)))


@pytest.mark.parametrize("options", [*OPTIONS, {"logprobs": 2}, {"logprobs": 1, "n": 2, "max_tokens": 3}])
def test_completions(server: ApiServer, options: dict[str, Any]) -> None:
    fields = {"prompt": "\n", "temperature": 0, **options}
    whole = server.ok(TEXT, **fields)
    strictly(Completion, whole)
    chunks = server.stream(TEXT, **fields, stream_options=USAGE)
    said_alike(chunks)
    ends: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert choice["index"] not in ends
            if choice["finish_reason"] is None:
                choice["finish_reason"] = "stop"  # the type has no null, which OpenAI sends all the same
            else:
                ends[choice["index"]] = choice["finish_reason"]
        strictly(Completion, chunk)
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}


def test_c28_a_scored_prompt(server: ApiServer) -> None:
    """The first token has ``null``, which OpenAI sends too; its type has none."""
    content = server.complete("Lx", echo=True, logprobs=1, max_tokens=0)
    logprobs = content["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"].pop(0) is None
    assert logprobs["top_logprobs"].pop(0) is None
    strictly(Completion, content)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_output_tokens": 2},
        {"max_output_tokens": 0},
        {"stop": "r"},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {
            "instructions": "Be kind",
            "metadata": {"a": "b"},
            "user": "me",
            "service_tier": "auto",
            "tool_choice": "none",
        },
    ],
)
def test_responses(server: ApiServer, options: dict[str, Any]) -> None:
    fields = {"input": "Hello", "temperature": 0, **options}
    whole = strictly(Response, server.ok(RESPONSES, **fields))
    reply = server.post(RESPONSES, stream=True, **fields)
    events = [_EVENT.validate_python(strict_json(data), strict=True) for _, data in sse_events(reply.raw)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert (last.status, last.output_text, last.incomplete_details) == (
        whole.status,
        whole.output_text,
        whole.incomplete_details,
    )
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert last.output[0].content == whole.output[0].content
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == last.output_text
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert done.text == last.output_text


def test_a_response_that_fails(server: ApiServer) -> None:
    """``!`` in a prompt makes logits that are not numbers."""
    reply = server.post(RESPONSES, input="!", stream=True)
    assert reply.status == 200
    events = [_EVENT.validate_python(strict_json(data), strict=True) for _, data in sse_events(reply.raw)]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    assert "not finite" in events[-1].response.error.message
    whole = server.post(RESPONSES, input="!")
    assert whole.status == 500
    assert whole.error["type"] == "server_error"
    server.assert_serves()


def test_a_response_tells_the_defaults_that_counted(bos_server: ApiServer) -> None:
    """The model's file says temperature 2."""
    assert bos_server.ok(RESPONSES, input="x")["temperature"] == 2.0
    assert bos_server.ok(RESPONSES, input="x", temperature=0, top_p=0.5)["temperature"] == 0.0
    assert bos_server.ok(RESPONSES, input="x", top_p=0.5)["top_p"] == 0.5


def test_models(server: ApiServer) -> None:
    content = server.get("/v1/models").content
    assert content["object"] == "list"
    for model in content["data"]:
        assert strictly(Model, model) == strictly(Model, server.get(f"/v1/models/{model['id']}").content)
