"""``/v1/chat/completions``: a conversation in, answers out, whole or as a stream. Belongs to the event loop."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response

from gapless.errors import RequestError
from gapless.sampling_params import SamplingParams
from gapless.server.context import ServerContext
from gapless.server.endpoints.answering import Answer, IndexedDelta
from gapless.server.endpoints.chunks import ChunkFrame, Heading, json_bytes, with_errors
from gapless.server.endpoints.logprobs import chat_logprobs, prompt_logprobs_by_id
from gapless.server.endpoints.prompting import ChatPrompter
from gapless.server.endpoints.requests import (
    POST_ERRORS,
    TEMPLATE_NAMES,
    checked_logprobs,
    checked_model,
    checked_stream_options,
    naming,
    salted,
    stream_content,
)
from gapless.server.error_bodies import ApiError
from gapless.server.json_bodies import StrictJsonRoute
from gapless.server.protocol.chat import ChatChunk, ChatCompletion, ChatRequest
from gapless.server.protocol.sampling import sampling_params
from gapless.server.security import salt_of
from gapless.server.sse import DONE, EventStreamResponse, unless_client_leaves
from gapless.text.tokenizer import Tokenizer

__all__ = ["chat_router"]

_OK = {
    "model": ChatCompletion,
    "description": "The answers; with `stream`, events whose data are chunks, and at last `[DONE]`.",
}


def chat_router(context: ServerContext, prompter: ChatPrompter) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post(
        "/v1/chat/completions",
        tags=["generation"],
        summary="Answer a conversation",
        response_class=Response,
        responses={
            200: {**_OK, "content": stream_content(ChatChunk)},
            **POST_ERRORS,
        },
    )
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        model = checked_model(context, body.model)
        _check(body)
        with naming(body, **_names(body)):
            params = _params(body, context)
            answer = await unless_client_leaves(request, _start(body, context, prompter, params, request))
        heading = Heading(f"chatcmpl-{uuid.uuid4().hex}", model)
        tokenizer = context.client.tokenizer
        if body.stream:
            frame = ChunkFrame(heading, "chat.completion.chunk", body.stream_options, answer)
            return EventStreamResponse(with_errors(_events(answer, frame, tokenizer, body)), answer)
        content = await unless_client_leaves(request, _whole(answer, heading, tokenizer, body))
        return Response(json_bytes(content), media_type="application/json")

    return router


def _names(body: ChatRequest) -> dict[str, str]:
    max_tokens = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {"max_tokens": max_tokens, "logprobs": "top_logprobs", **TEMPLATE_NAMES}


def _check(body: ChatRequest) -> None:
    checked_stream_options(body.stream_options, stream=body.stream, prompt_logprobs=body.prompt_logprobs)
    if body.tools and body.tool_choice != "none":
        raise ApiError(400, "tools are not supported; send tool_choice='none'", param="tools", code="unsupported")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise ApiError(
            400,
            f"max_tokens={both[0]} and max_completion_tokens={both[1]} differ; give one of them",
            param="max_tokens",
            code="invalid_value",
        )


def _params(body: ChatRequest, context: ServerContext) -> SamplingParams:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return sampling_params(
        body,
        context.client.get_default_sampling_params(),
        max_tokens=max_tokens,
        max_tokens_default=None,
        logprobs=checked_logprobs(body.top_logprobs, wanted=bool(body.logprobs), needs="logprobs=true"),
    )


async def _start(
    body: ChatRequest, context: ServerContext, prompter: ChatPrompter, params: SamplingParams, request: Request
) -> Answer:
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise RequestError("continue_final_message and add_generation_prompt cannot both be true; turn one of them off")
    prompt = await prompter.prepare(
        body.messages,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_variables=body.chat_template_kwargs,
    )
    return await Answer.start(context, [salted(prompt, body)], params, salt=salt_of(request))


async def _whole(answer: Answer, heading: Heading, tokenizer: Tokenizer, body: ChatRequest) -> dict[str, Any]:
    async with answer:
        choices = await answer.collect()
        content: dict[str, Any] = {
            **heading.fields("chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": _logprobs(choice.token_ids, choice.logprobs, tokenizer, body),
                    "finish_reason": choice.finish_reason,
                    "stop_reason": choice.stop_reason,
                }
                for choice in choices
            ],
            "usage": answer.usage(),
        }
        if body.service_tier is not None:
            content["service_tier"] = "default"
        if body.prompt_logprobs is not None:
            content["prompt_logprobs"] = await asyncio.to_thread(_prompt_logprobs, answer)
        return content


def _prompt_logprobs(answer: Answer) -> Any:
    """Those of a long prompt take long to write."""
    found = answer.generations[0].prompt_logprobs
    return None if found is None else prompt_logprobs_by_id(found)


async def _events(
    answer: Answer, frame: ChunkFrame, tokenizer: Tokenizer, body: ChatRequest
) -> AsyncGenerator[bytes, None]:
    opening = b"".join(
        frame.chunk(
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        )
        for index in range(answer.params.n)
    )
    async for batch in answer.news():
        written = opening + b"".join([_chunks(each, frame, tokenizer, body) for each in batch])
        opening = b""
        if written:
            yield written
    yield frame.usage_chunk() + DONE


def _chunks(news: IndexedDelta, frame: ChunkFrame, tokenizer: Tokenizer, body: ChatRequest) -> bytes:
    """The content of a delta, and its end as a chunk of its own."""
    delta, written = news.delta, b""
    logprobs = b"null"
    if body.logprobs and delta.token_ids:
        logprobs = json_bytes(_logprobs(delta.token_ids, delta.logprobs or [], tokenizer, body))
    if delta.text or logprobs != b"null":
        written = frame.chunk(
            b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null}'
            % (news.index, json_bytes(delta.text), logprobs)
        )
    if delta.finish_reason is not None:
        written += frame.chunk(
            b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
            % (news.index, json_bytes(delta.finish_reason), json_bytes(delta.stop_reason))
        )
    return written


def _logprobs(token_ids: list[int], places: Any, tokenizer: Tokenizer, body: ChatRequest) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    entries = chat_logprobs(token_ids, places, tokenizer, num_top=body.top_logprobs or 0)
    return {"content": entries, "refusal": None}
