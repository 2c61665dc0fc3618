"""The real ``openai`` client against the live server: what it sends is understood, what it gets it can read."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from fixtures.api_server import MODEL, ApiServer

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
ANSWER = "himore"


@pytest.fixture
def client(server: ApiServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "alias/of-it"]
    assert client.models.retrieve("alias/of-it").id == "alias/of-it"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-99")
    assert caught.value.code == "model_not_found"


def test_a_chat(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, n=2, logprobs=True, top_logprobs=2, extra_body={"top_k": 5}
    )
    assert [choice.message.content for choice in chat.choices] == [ANSWER, ANSWER]
    assert chat.choices[0].finish_reason == "stop"
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "h"
    assert len(logprobs.content[0].top_logprobs) == 2
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 16
    assert chat.usage.prompt_tokens_details is not None


def test_c55_a_streamed_chat(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_the_helper_for_streams(client: OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, temperature=0) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


def test_completions(client: OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt=["P", "L"], temperature=0, logprobs=1, max_tokens=3)
    assert [choice.text for choice in completion.choices] == ["pq", "x"]
    scored = client.completions.create(model=MODEL, prompt="Lx", echo=True, logprobs=1, max_tokens=0)
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["L", "x"]
    stream = client.completions.create(model=MODEL, prompt="P", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "pq"


def test_responses(client: OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello", temperature=0)
    assert response.output_text == ANSWER
    assert response.status == "completed"
    events = list(client.responses.create(model=MODEL, input="Hello", temperature=0, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    assert final.usage is not None
    assert final.usage.output_tokens == 8


def test_errors_become_exceptions(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-99", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL, prompt="!")
    with pytest.raises(openai.APIError, match="not finite"):
        list(client.completions.create(model=MODEL, prompt="!", stream=True))
    assert client.completions.create(model=MODEL, prompt="P", temperature=0).choices[0].text == "pq"


def test_many_at_once_with_the_asynchronous_client(server: ApiServer) -> None:
    async def one(client: AsyncOpenAI, stream: bool) -> str:
        if not stream:
            chat = await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
            return chat.choices[0].message.content or ""
        text = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, temperature=0, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, stream=number % 2 == 0) for number in range(30)))

    assert asyncio.run(all_of_them()) == [ANSWER] * 30


def test_responses_of_the_asynchronous_client(server: ApiServer) -> None:
    async def whole(client: AsyncOpenAI) -> str:
        response = await client.responses.create(model=MODEL, input="Hello", temperature=0)
        assert response.status == "completed"
        return response.output_text

    async def streamed(client: AsyncOpenAI) -> str:
        events = await client.responses.create(model=MODEL, input="Hello", temperature=0, stream=True)
        seen = [event async for event in events]
        assert (seen[0].type, seen[-1].type) == ("response.created", "response.completed")
        return "".join(event.delta for event in seen if event.type == "response.output_text.delta")

    async def with_the_helper(client: AsyncOpenAI) -> str:
        async with client.responses.stream(model=MODEL, input="Hello", temperature=0) as stream:
            async for _ in stream:
                pass
            return (await stream.get_final_response()).output_text

    async def cut_off(client: AsyncOpenAI) -> str:
        response = await client.responses.create(model=MODEL, input="Hello", temperature=0, max_output_tokens=2)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        return response.output_text

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model=MODEL, input="Hello", temperature=-1, stream=True)
            assert caught.value.param == "temperature"
            ways = (whole, streamed, with_the_helper) * 5
            return await asyncio.gather(cut_off(client), *(way(client) for way in ways))

    assert asyncio.run(all_of_them()) == ["hi", *[ANSWER] * 15]


def test_completions_of_the_asynchronous_client(server: ApiServer) -> None:
    async def both() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            whole = await client.completions.create(model=MODEL, prompt="P", temperature=0)
            stream = await client.completions.create(model=MODEL, prompt="P", temperature=0, stream=True)
            return [whole.choices[0].text, "".join([chunk.choices[0].text async for chunk in stream])]

    assert asyncio.run(both()) == ["pq", "pq"]


def test_c54_a_client_that_leaves_a_stream(server: ApiServer, client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="Q", temperature=0, stream=True, max_tokens=250, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    server.assert_serves()
    assert server.wait_until_idle()
