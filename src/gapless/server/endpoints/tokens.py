"""``/tokenize`` and ``/detokenize``: the ids that a request would have, the text of ids. Belongs to the event loop."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter

from gapless.errors import RequestError
from gapless.server.context import ServerContext
from gapless.server.endpoints.prompting import ChatPrompter, completion_prompts
from gapless.server.endpoints.requests import POST_ERRORS, TEMPLATE_NAMES, checked_model, naming
from gapless.server.json_bodies import StrictJsonRoute
from gapless.server.protocol.models import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from gapless.text.tokenizer import Tokenizer
from gapless.text.validation import check_token_ids

__all__ = ["tokens_router"]


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

    @router.post("/detokenize", summary="Decode token ids", responses=POST_ERRORS)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        checked_model(context, body.model)

        def decode() -> str:
            ids = check_token_ids(body.tokens, client.vocab_size, "tokens") if body.tokens else []
            return client.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))

        with naming(body):
            return Detokenized(prompt=await asyncio.to_thread(decode))

    return router


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
