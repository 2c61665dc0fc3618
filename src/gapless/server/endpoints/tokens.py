"""``/tokenize`` and ``/detokenize``: the ids that a request would have, the text of ids. Belongs to the event loop.

A million ids are a body of two megabytes, and their text may have a hundred. So the text of a long list is made and
sent a piece at a time, as fast as the client reads it: what is held is the request and one piece.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from gapless.errors import RequestError
from gapless.sampling_params import are_token_ids
from gapless.server.context import ServerContext
from gapless.server.endpoints.chunks import json_bytes
from gapless.server.endpoints.prompting import ChatPrompter, completion_prompts
from gapless.server.endpoints.requests import POST_ERRORS, TEMPLATE_NAMES, checked_model, naming
from gapless.server.json_bodies import StrictJsonRoute
from gapless.server.protocol.models import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from gapless.text.long_texts import PIECE_IDS, decoded_pieces
from gapless.text.tokenizer import Tokenizer
from gapless.text.validation import check_token_ids

__all__ = ["tokens_router"]

_JSON: Final = "application/json"


def tokens_router(context: ServerContext, prompter: ChatPrompter) -> APIRouter:
    """The routes."""
    router = APIRouter(route_class=StrictJsonRoute, tags=["tokens"])
    client = context.client

    @router.post("/tokenize", summary="Tokenise", responses=POST_ERRORS, response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        checked_model(context, body.model)
        with naming(body, **TEMPLATE_NAMES):
            ids = await _ids(body, context, prompter)
        texts = await asyncio.to_thread(_texts, ids, client.tokenizer) if body.return_token_strs else None
        return Tokenized(
            count=len(ids),
            max_model_len=client.max_model_len,
            tokens=ids,
            token_strs=texts,
        )

    @router.post("/detokenize", summary="Decode token ids", response_model=Detokenized, responses=POST_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Response:
        checked_model(context, body.model)
        ids, skips = body.tokens, bool(body.skip_special_tokens)
        if not ids:
            return _detokenized("")
        with naming(body):
            await asyncio.to_thread(_check_ids, ids, client.vocab_size)
        if len(ids) <= PIECE_IDS:
            return _detokenized(await asyncio.to_thread(client.tokenizer.decode, ids, skip_special_tokens=skips))
        pieces = decoded_pieces(ids, client.tokenizer, skip_special_tokens=skips)
        first = await asyncio.to_thread(
            next, pieces
        )  # before the head is sent: whatever fails is still told as an error
        return StreamingResponse(_detokenized_pieces(first, pieces), media_type=_JSON)

    return router


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not are_token_ids(ids, vocab_size):
        check_token_ids(ids, vocab_size, "tokens")  # names the one that is wrong


def _detokenized(text: str) -> Response:
    return Response(json_bytes({"prompt": text}), media_type=_JSON)


async def _detokenized_pieces(first: str, others: Iterator[str]) -> AsyncIterator[bytes]:
    """The JSON of a :class:`Detokenized`; each piece is made in a thread, after the one before has been sent."""
    yield b'{"prompt":"' + _inside_string(first)
    while (piece := await asyncio.to_thread(next, others, None)) is not None:
        yield _inside_string(piece)
    yield b'"}'


def _inside_string(text: str) -> bytes:
    return json_bytes(text)[1:-1]


def _texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_bytes(each).decode(errors="replace") for each in ids]


async def _ids(body: TokenizeRequest, context: ServerContext, prompter: ChatPrompter) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt and messages: give one of the two")
    if body.messages is None:
        [prompt] = await completion_prompts(
            body.prompt,
            context.client.tokenizer,
            n=1,
            add_special_tokens=body.add_special_tokens is not False,
            max_model_len=context.client.max_model_len,
        )
        return prompt.token_ids
    continues = bool(body.continue_final_message)
    prompt = await prompter.prepare(
        body.messages,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_variables=body.chat_template_kwargs,
    )
    return prompt.token_ids
