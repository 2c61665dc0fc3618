"""``/v1/responses``: text in, text out, and the events of a stream."""

from typing import Any

import pytest

from fixtures.api_server import ApiServer, sse_events, strict_json

RESPONSES = "/v1/responses"
ANSWER = "himore"


def events_of(server: ApiServer, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name and numbered from 0."""
    reply = server.post(RESPONSES, stream=True, **fields)
    assert reply.status == 200
    events = []
    for name, data in sse_events(reply.raw):
        event = strict_json(data)
        assert event["type"] == name
        assert event["sequence_number"] == len(events)
        events.append(event)
    return events


def test_a_response(server: ApiServer) -> None:
    content = server.ok(RESPONSES, input="Hello", temperature=0, metadata={"a": "b"}, user="me")
    assert content["object"] == "response"
    assert content["id"].startswith("resp_")
    assert content["status"] == "completed"
    assert content["error"] is None
    assert content["incomplete_details"] is None
    assert content["metadata"] == {"a": "b"}
    [message] = content["output"]
    assert message["role"] == "assistant"
    assert message["content"] == [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}]
    usage = content["usage"]
    assert usage["output_tokens"] == 8
    assert usage["total_tokens"] == usage["input_tokens"] + 8


def test_a_response_that_was_cut_off_is_incomplete(server: ApiServer) -> None:
    content = server.ok(RESPONSES, input="Hello", temperature=0, max_output_tokens=2)
    assert content["status"] == "incomplete"
    assert content["incomplete_details"] == {"reason": "max_output_tokens"}
    assert content["output"][0]["status"] == "incomplete"
    assert content["output"][0]["content"][0]["text"] == "hi"


def test_the_events_of_a_stream(server: ApiServer) -> None:
    events = events_of(server, input="Hello", temperature=0)
    names = [event["type"].removeprefix("response.") for event in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"}
    assert "".join(event["delta"] for event in events[4:-4]) == ANSWER
    last = events[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == ANSWER
    assert events[-2]["item"] == last["output"][0]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    item_id = last["output"][0]["id"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item_id}
    whole = server.ok(RESPONSES, input="Hello", temperature=0)
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_stream_that_was_cut_off_ends_incomplete(server: ApiServer) -> None:
    events = events_of(server, input="Hello", temperature=0, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_all_forms_of_an_input_make_the_same_prompt(server: ApiServer) -> None:
    plain = server.ok(RESPONSES, input="Hello", instructions="Be kind")["usage"]["input_tokens"]
    message = {"role": "user", "content": [{"type": "input_text", "text": "Hello"}], "type": "message"}
    listed = server.ok(RESPONSES, input=[message], instructions="Be kind")["usage"]["input_tokens"]
    whole = server.ok(RESPONSES, input=[{"role": "system", "content": "Be kind"}, message])["usage"]["input_tokens"]
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    assert plain == listed == whole == server.ok("/tokenize", messages=messages)["count"]


def test_an_answer_can_be_sent_back(server: ApiServer) -> None:
    first = server.ok(RESPONSES, input="Hello", temperature=0)
    history = [{"role": "user", "content": "Hello"}, *first["output"], {"role": "user", "content": "Again"}]
    assert server.ok(RESPONSES, input=history, temperature=0)["output"][0]["content"][0]["text"] == ANSWER


def test_logprobs_where_they_are_included(server: ApiServer) -> None:
    options = {"input": "Hello", "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [message] = server.ok(RESPONSES, **options)["output"]
    logprobs = message["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == ["h", "i", "<|im_end|>", "m", "o", "r", "e", "</s>"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    events = events_of(server, **options)
    deltas = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert deltas == logprobs
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs
    reply = server.post(RESPONSES, input="x", top_logprobs=2)
    assert reply.status == 400
    assert reply.error["param"] == "top_logprobs"
    server.assert_serves()


@pytest.mark.parametrize("stream", [False, True])
def test_c41_an_input_that_is_too_long(server: ApiServer, stream: bool) -> None:
    reply = server.post(RESPONSES, input="x" * 400, stream=stream)
    assert reply.status == 400
    assert reply.error["code"] == "context_length_exceeded"
    assert reply.error["param"] == "input"
    server.assert_serves()


def test_nothing_is_stored(server: ApiServer) -> None:
    made = server.ok(RESPONSES, input="Hello", temperature=0)
    assert made["store"] is False
    assert server.get(f"/v1/responses/{made['id']}").status == 404
