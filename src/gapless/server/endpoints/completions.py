"""``/v1/completions``: prompts in, continuations out, whole or as a stream. Belongs to the event loop."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gapless.errors import RequestError
from gapless.outputs import TokenLogprobsById
from gapless.prompts import PreparedPrompt
from gapless.sampling_params import SamplingParams
from gapless.server.context import ServerContext
from gapless.server.endpoints.answering import Answer, CollectedChoice, IndexedDelta
from gapless.server.endpoints.chunks import ChunkFrame, Heading, json_bytes, with_errors
from gapless.server.endpoints.logprobs import (
    OffsetCounter,
    completion_logprobs,
    joined_completion_logprobs,
    prompt_logprobs_by_id,
)
from gapless.server.endpoints.prompting import completion_prompts
from gapless.server.endpoints.requests import (
    POST_ERRORS,
    checked_model,
    checked_stream_options,
    naming,
    salted,
    stream_content,
)
from gapless.server.error_bodies import ApiError
from gapless.server.generation import Generation
from gapless.server.json_bodies import StrictJsonRoute
from gapless.server.protocol.completions import Completion, CompletionChunk, CompletionRequest
from gapless.server.protocol.sampling import sampling_params
from gapless.server.security import salt_of
from gapless.server.sse import DONE, EventStreamResponse, unless_client_leaves
from gapless.text.tokenizer import Tokenizer

__all__ = ["completions_router"]

MAX_ECHOED_CHARACTERS: Final = 1 << 24
_DEFAULT_MAX_TOKENS = 16
_OK = {
    "model": Completion,
    "description": "The continuations; with `stream`, events whose data are chunks, and at last `[DONE]`.",
}


def completions_router(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post(
        "/v1/completions",
        tags=["generation"],
        summary="Continue prompts",
        response_class=Response,
        responses={
            200: {**_OK, "content": stream_content(CompletionChunk)},
            **POST_ERRORS,
        },
    )
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        model = checked_model(context, body.model)
        _check(body)
        with naming(body):
            params = sampling_params(
                body,
                context.client.get_default_sampling_params(),
                max_tokens=body.max_tokens,
                max_tokens_default=_DEFAULT_MAX_TOKENS,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )
            answer = await unless_client_leaves(request, _start(body, context, params, request))
        writer = _Writer(answer, Heading(f"cmpl-{uuid.uuid4().hex}", model), context.client.tokenizer, body)
        if body.stream:
            return EventStreamResponse(with_errors(writer.events()), answer)
        content = await unless_client_leaves(request, writer.whole())
        return Response(json_bytes(content), media_type="application/json")

    return router


def _check(body: CompletionRequest) -> None:
    checked_stream_options(body.stream_options, stream=body.stream, prompt_logprobs=body.prompt_logprobs)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of={body.best_of} must equal n={body.n or 1}: no choices are left out",
            param="best_of",
            code="unsupported",
        )
    if body.echo and body.logprobs is not None and body.prompt_logprobs not in (None, body.logprobs):
        raise ApiError(
            400,
            f"prompt_logprobs={body.prompt_logprobs} must equal logprobs={body.logprobs} with echo; leave it out",
            param="prompt_logprobs",
            code="invalid_value",
        )


async def _start(body: CompletionRequest, context: ServerContext, params: SamplingParams, request: Request) -> Answer:
    client = context.client
    prompts = await completion_prompts(
        body.prompt,
        client.tokenizer,
        n=params.n,
        add_special_tokens=body.add_special_tokens is not False,
        max_model_len=client.max_model_len,
    )
    num_echoed = sum(len(each.text or each.token_ids) for each in prompts) * params.n if body.echo else 0
    if num_echoed > MAX_ECHOED_CHARACTERS:
        raise RequestError(
            f"echo would repeat {num_echoed} characters, with n={params.n}; at most {MAX_ECHOED_CHARACTERS} are allowed"
        )
    return await Answer.start(context, [salted(each, body) for each in prompts], params, salt=salt_of(request))


class _Writer:
    """Writes one answer."""

    def __init__(self, answer: Answer, heading: Heading, tokenizer: Tokenizer, body: CompletionRequest) -> None:
        self._answer = answer
        self._heading = heading
        self._tokenizer = tokenizer
        self._body = body
        self._params = answer.params
        self._echoes = {id(each): self._text_of(each.prompt) for each in answer.generations} if body.echo else {}
        self._offsets: dict[int, OffsetCounter] = {}

    async def whole(self) -> dict[str, Any]:
        """The answer at its end."""
        async with self._answer:
            choices = await self._answer.collect()
            # Log-probs of long prompts take long to write.
            written = (
                await asyncio.to_thread(lambda: [self._choice(choice) for choice in choices])
                if self._answer.params.prompt_logprobs is not None
                else [self._choice(choice) for choice in choices]
            )
            return {
                **self._heading.fields("text_completion"),
                "choices": written,
                "usage": self._answer.usage(),
            }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes."""
        frame = ChunkFrame(self._heading, "text_completion", self._body.stream_options, self._answer)
        opened: set[int] = set()
        async for batch in self._answer.news():
            written = b""
            for each in batch:
                if self._body.echo and each.index not in opened:
                    opened.add(each.index)
                    written += frame.chunk(await asyncio.to_thread(self._opening, each))
                written += self._chunk(each, frame)
            if written:
                yield written
        yield frame.usage_chunk() + DONE

    def _choice(self, choice: CollectedChoice) -> dict[str, Any]:
        generation = choice.generation
        parts = []
        if self._body.echo:
            parts.append(self._prompt_logprobs(generation))
        parts.append(self._logprobs(choice.index, generation, choice.token_ids, choice.logprobs))
        found = [part for part in parts if part is not None]
        content: dict[str, Any] = {
            "index": choice.index,
            "text": self._echoes.get(id(generation), "") + choice.text,
            "logprobs": joined_completion_logprobs(found) if found else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None and generation.prompt_logprobs is not None:
            content["prompt_logprobs"] = prompt_logprobs_by_id(generation.prompt_logprobs)
        return content

    def _opening(self, news: IndexedDelta) -> bytes:
        """The echoed prompt, as a chunk of its own."""
        return _chunk_of(
            news.index, self._echoes[id(news.generation)], json_bytes(self._prompt_logprobs(news.generation))
        )

    def _chunk(self, news: IndexedDelta, frame: ChunkFrame) -> bytes:
        delta = news.delta
        logprobs = b"null"
        if self._body.logprobs is not None and delta.token_ids:
            logprobs = json_bytes(self._logprobs(news.index, news.generation, delta.token_ids, delta.logprobs or []))
        if not delta.text and logprobs == b"null" and delta.finish_reason is None:
            return b""
        if delta.finish_reason is None:
            return frame.chunk(_chunk_of(news.index, delta.text, logprobs))
        return frame.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b}'
            % (
                news.index,
                json_bytes(delta.text),
                logprobs,
                json_bytes(delta.finish_reason),
                json_bytes(delta.stop_reason),
            )
        )

    def _logprobs(
        self, index: int, generation: Generation, token_ids: list[int], places: list[TokenLogprobsById]
    ) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        if index not in self._offsets:
            start = len(self._echoes.get(id(generation), ""))
            self._offsets[index] = self._counter(start)
        offsets = self._offsets[index].take(token_ids)
        return completion_logprobs(token_ids, places, self._tokenizer, num_top=self._body.logprobs, offsets=offsets)

    def _prompt_logprobs(self, generation: Generation) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        ids = generation.prompt.token_ids
        places = generation.prompt_logprobs
        assert places is not None, "prompt log-probs are there before the first token"
        most = len(self._echoes[id(generation)])
        offsets = [min(offset, most) for offset in self._counter(0).take(ids)]
        return completion_logprobs(ids, places, self._tokenizer, num_top=self._body.logprobs, offsets=offsets)

    def _counter(self, start: int) -> OffsetCounter:
        return OffsetCounter(self._tokenizer, skip_special_tokens=self._params.skip_special_tokens, start=start)

    def _text_of(self, prompt: PreparedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=self._params.skip_special_tokens)


def _chunk_of(index: int, text: str, logprobs: bytes) -> bytes:
    return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":null}' % (index, json_bytes(text), logprobs)
