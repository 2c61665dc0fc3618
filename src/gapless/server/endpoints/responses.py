"""``/v1/responses``: text in, text out, whole or as a stream of named events. Belongs to the event loop.

A stream is a small drama that clients rely on: created, in progress, an item and its part are added, deltas of text,
then text, part and item are done, and the response is completed or, at the limit of tokens, incomplete. Events are
numbered. An error on the way is the event ``response.failed``.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from fastapi import APIRouter, Request, Response

from gapless.sampling_params import SamplingParams
from gapless.server.context import ServerContext
from gapless.server.endpoints.answering import Answer
from gapless.server.endpoints.chunks import json_bytes
from gapless.server.endpoints.logprobs import chat_logprobs
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
from gapless.server.endpoints.response_input import messages_of
from gapless.server.error_bodies import api_error_of
from gapless.server.json_bodies import StrictJsonRoute
from gapless.server.protocol import responses as wire
from gapless.server.protocol.sampling import sampling_params
from gapless.server.security import salt_of
from gapless.server.sse import EventStreamResponse, named_event, unless_client_leaves
from gapless.text.tokenizer import Tokenizer

__all__ = ["responses_router"]

_NAMES = {"max_tokens": "max_output_tokens", "logprobs": "top_logprobs", "messages": "input", **TEMPLATE_NAMES}
_Status = Literal["in_progress", "completed", "incomplete", "failed"]


def responses_router(context: ServerContext, prompter: ChatPrompter) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictJsonRoute)

    @router.post(
        "/v1/responses",
        tags=["generation"],
        summary="Answer a text",
        response_class=Response,
        responses={
            200: {
                "model": wire.Response,
                "description": "The response; with `stream`, named events up to one that ends it.",
                "content": stream_content(wire.ResponseEvent),
            },
            **POST_ERRORS,
        },
    )
    async def create_response(body: wire.ResponseRequest, request: Request) -> Response:
        model = checked_model(context, body.model)
        checked_stream_options(body.stream_options, stream=body.stream)
        with naming(body, **_NAMES):
            params = sampling_params(
                body,
                context.client.get_default_sampling_params(),
                max_tokens=body.max_output_tokens,
                max_tokens_default=None,
                logprobs=_num_logprobs(body),
            )
            answer = await unless_client_leaves(request, _start(body, context, prompter, params, request))
        writer = _Writer(answer, model, context.client.tokenizer, body)
        if body.stream:
            return EventStreamResponse(writer.events(), answer)
        content = await unless_client_leaves(request, writer.whole())
        return Response(json_bytes(content), media_type="application/json")

    return router


def _num_logprobs(body: wire.ResponseRequest) -> int | None:
    return checked_logprobs(
        body.top_logprobs,
        wanted=wire.LOGPROBS_INCLUDE in (body.include or ()),
        needs=f"include=['{wire.LOGPROBS_INCLUDE}']",
    )


async def _start(
    body: wire.ResponseRequest,
    context: ServerContext,
    prompter: ChatPrompter,
    params: SamplingParams,
    request: Request,
) -> Answer:
    prompt = await prompter.prepare(
        messages_of(body),
        add_generation_prompt=True,
        continue_final_message=False,
        template_variables=body.chat_template_kwargs,
        field="input",
    )
    return await Answer.start(context, [salted(prompt, body)], params, salt=salt_of(request))


class _Writer:
    """Writes one response."""

    def __init__(self, answer: Answer, model: str, tokenizer: Tokenizer, body: wire.ResponseRequest) -> None:
        self._answer = answer
        self._tokenizer = tokenizer
        self._body = body
        self._num_logprobs = _num_logprobs(body)
        self._sequence_number = 0
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason: str | None = None
        self._heading = _heading(model, body, answer.params)

    async def whole(self) -> dict[str, Any]:
        """The response at its end."""
        async with self._answer:
            [choice] = await self._answer.collect()
            self._texts, self._finish_reason = choice.texts, choice.finish_reason
            self._logprobs = self._rated(choice.token_ids, choice.logprobs)
            return self._response(self._final_status())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response as it comes."""
        try:
            yield self._opening()
            async for batch in self._answer.news():
                written = b""
                for each in batch:
                    delta = each.delta
                    rated = self._rated(delta.token_ids, delta.logprobs or [])
                    self._logprobs += rated
                    self._finish_reason = delta.finish_reason
                    if delta.text:
                        self._texts.append(delta.text)
                    if delta.text or rated:
                        written += self._of_part("response.output_text.delta", delta=delta.text, logprobs=rated)
                if written:
                    yield written
            yield self._closing()
        except Exception as error:
            yield self._failure(error)

    def _opening(self) -> bytes:
        return b"".join(
            (
                self._event("response.created", response=self._response("in_progress")),
                self._event("response.in_progress", response=self._response("in_progress")),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._of_part("response.content_part.added", part=_part("", [])),
            )
        )

    def _closing(self) -> bytes:
        text, status = "".join(self._texts), self._final_status()
        part = _part(text, self._logprobs)
        return b"".join(
            (
                self._of_part("response.output_text.done", text=text, logprobs=self._logprobs),
                self._of_part("response.content_part.done", part=part),
                self._event("response.output_item.done", output_index=0, item=self._item(status, [part])),
                self._event(f"response.{status}", response=self._response(status)),
            )
        )

    def _failure(self, error: Exception) -> bytes:
        failed = api_error_of(error)
        content = {"code": "server_error", "message": failed.message}
        return self._event("response.failed", response={**self._response("failed"), "error": content})

    def _event(self, name: str, **content: Any) -> bytes:
        data = {"type": name, "sequence_number": self._sequence_number, **content}
        self._sequence_number += 1
        return named_event(name, json_bytes(data))

    def _of_part(self, name: str, **content: Any) -> bytes:
        return self._event(name, item_id=self._item_id, output_index=0, content_index=0, **content)

    def _final_status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "role": "assistant", "status": status, "content": content}

    def _response(self, status: _Status) -> dict[str, Any]:
        output, usage = [], None
        if status in ("completed", "incomplete"):
            output = [self._item(status, [_part("".join(self._texts), self._logprobs)])]
            usage = _usage(self._answer.usage())
        return {
            **self._heading,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": usage,
        }

    def _rated(self, token_ids: list[int], places: list[Any]) -> list[dict[str, Any]]:
        if self._num_logprobs is None:
            return []
        return chat_logprobs(token_ids, places, self._tokenizer, num_top=self._num_logprobs)


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _heading(model: str, body: wire.ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """What a response says of itself and of what was asked for."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "service_tier": "default" if body.service_tier is not None else None,
        "store": False,
        "background": False,
        "temperature": float(params.temperature),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": float(params.top_p),
        "truncation": "disabled",
        "user": body.user,
    }
