"""One request's record: what counts as text, as a token, and as a failure."""

import asyncio
import time

import pytest

from gapless.bench.serving.http_client import HttpClient, Origin
from gapless.bench.serving.prompts import ServingRequest
from gapless.bench.serving.sending import RequestRecord, error_message, send
from unit.bench.serving.speaking_server import Answer, Handler, Received, chat_chunk, serving, text_chunk, usage_chunk

REQUEST = ServingRequest(path="/chat/completions", body=b"{}")


def record_of(handler: Handler, *, timeout_s: float = 20.0) -> RequestRecord:
    async def both() -> RequestRecord:
        async with serving(handler) as server, HttpClient(Origin.parse(f"{server.url}/v1")) as client:
            return await send(client, REQUEST, scheduled_s=time.perf_counter(), timeout_s=timeout_s)

    return asyncio.run(asyncio.wait_for(both(), 30))


def test_a_chat_is_recorded_event_by_event() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        assert request.path == "/v1/chat/completions"
        await answer.begin_stream()
        await answer.event(chat_chunk("", role="assistant"))
        for text in ("Hello", " wor", "ld"):
            await answer.event(chat_chunk(text))
        await answer.event(chat_chunk(None))
        await answer.event(usage_chunk(11, 5))
        await answer.event("[DONE]")
        await answer.end_stream()

    record = record_of(handler)
    assert record.failure is None
    assert len(record.text_s) == 3, "a role, an end and a usage are no text"
    assert (record.prompt_tokens, record.output_tokens) == (11, 5)
    assert record.scheduled_s <= record.sent_s < record.text_s[0] <= record.text_s[-1] <= record.ended_s
    assert len(record.itl_s) == 2


def test_text_of_one_read_has_one_time_and_a_pause_separates() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.begin_stream()
        both = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [{"text": "b"}]}\n\n'
        await answer.chunk(both)
        await asyncio.sleep(0.05)
        await answer.event(text_chunk("c"))
        await answer.event("[DONE]")
        await answer.end_stream()

    first, second, third = record_of(handler).text_s
    assert first == second
    assert third - second > 0.04


def test_without_usage_events_with_text_are_counted() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.begin_stream()
        for text in ("a", "", "b"):
            await answer.event(text_chunk(text))
        await answer.event({"choices": [{"delta": {"reasoning_content": "hm"}}]})
        await answer.event("[DONE]")
        await answer.end_stream()

    record = record_of(handler)
    assert record.prompt_tokens is None
    assert record.output_tokens == 3


def test_a_refusal_has_its_status_and_the_servers_words() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.whole(429, {"error": {"message": "the queue is  full", "type": "overloaded"}})

    record = record_of(handler)
    assert (record.failure, record.detail) == ("HTTP 429", "the queue is full")
    assert record.ttft_s is None


async def _one_token(answer: Answer) -> None:
    await answer.begin_stream()
    await answer.event(text_chunk("a"))


async def _breaks(request: Received, answer: Answer) -> None:
    await _one_token(answer)
    await answer.break_off()


async def _ends_early(request: Received, answer: Answer) -> None:
    await _one_token(answer)
    await answer.end_stream()


async def _tells_an_error(request: Received, answer: Answer) -> None:
    await _one_token(answer)
    await answer.event({"error": {"message": "the engine is gone"}})
    await answer.event("[DONE]")
    await answer.end_stream()


async def _talks_nonsense(request: Received, answer: Answer) -> None:
    await _one_token(answer)
    await answer.event("<html>")
    await answer.event("[DONE]")
    await answer.end_stream()


@pytest.mark.parametrize(
    ("handler", "failure", "detail"),
    [
        (_breaks, "broken connection", "in the middle of an answer"),
        (_ends_early, "incomplete stream", "[DONE]"),
        (_tells_an_error, "error event", "the engine is gone"),
        (_talks_nonsense, "error event", "<html>"),
    ],
)
def test_answers_that_are_not_whole_are_failures(handler: Handler, failure: str, detail: str) -> None:
    record = record_of(handler)
    assert record.failure == failure
    assert detail in record.detail
    assert len(record.text_s) == 1


@pytest.mark.parametrize("choices", ["5", "true", '{"text": "x"}', '["x", 5]'])
def test_choices_that_are_none_are_no_text(choices: str) -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.begin_stream()
        await answer.event(f'{{"choices": {choices}}}')
        await answer.event("[DONE]")
        await answer.end_stream()

    record = record_of(handler)
    assert (record.failure, record.text_s, record.output_tokens) == (None, (), 0)


def test_a_silent_server_runs_into_the_timeout() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await _one_token(answer)
        await asyncio.Event().wait()

    record = record_of(handler, timeout_s=1.5)
    assert (record.failure, record.detail) == ("timeout", "no complete answer within 1.5 s")
    assert not record.is_complete
    assert len(record.text_s) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"error": {"message": "a"}}, "a"),
        ({"error": "b"}, "b"),
        ({"detail": "Not Found"}, "Not Found"),
        ("plain\n text", "plain text"),
        ({"other": 1}, '{"other": 1}'),
    ],
)
def test_errors_of_any_form_are_read(answer: object, message: str) -> None:
    assert error_message(answer) == message
