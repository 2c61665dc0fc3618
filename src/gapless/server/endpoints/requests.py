"""What the generating endpoints ask of every request before anything else. Pure functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from pydantic import BaseModel

from gapless.errors import RequestError
from gapless.prompts import PreparedPrompt
from gapless.server.context import ServerContext
from gapless.server.error_bodies import ApiError, api_error_of, error_responses, model_not_found
from gapless.server.protocol.fields import RequestModel
from gapless.server.protocol.sampling import SamplingFields

__all__ = [
    "POST_ERRORS",
    "TEMPLATE_NAMES",
    "checked_logprobs",
    "checked_model",
    "checked_stream_options",
    "naming",
    "salted",
    "stream_content",
]

POST_ERRORS: Final = error_responses(400, 401, 404, 413, 429, 500, 503)
"""What the OpenAPI document says of everything that takes a body."""
TEMPLATE_NAMES: Final = {"template_variables": "chat_template_kwargs", "template": "chat_template_kwargs"}
"""The names for :func:`naming` of a request with a conversation."""


def checked_model(context: ServerContext, name: str | None) -> str:
    """The model's name as the client knows it.

    Raises:
        ApiError: 404, there is no such model.
    """
    names = context.client.served_model_names
    if name is None:
        return names[0]
    if name not in names:
        raise model_not_found(name)
    return name


def checked_stream_options(options: object, *, stream: bool | None, prompt_logprobs: int | None = None) -> None:
    """Refuse what goes only with a stream, or only without one."""
    if options is not None and not stream:
        raise ApiError(
            400, "stream_options needs stream=true; leave it out", param="stream_options", code="invalid_value"
        )
    if prompt_logprobs is not None and stream:
        raise ApiError(
            400,
            f"prompt_logprobs={prompt_logprobs} has no place in a stream; leave out one of the two",
            param="prompt_logprobs",
            code="unsupported",
        )


def checked_logprobs(top_logprobs: int | None, *, wanted: bool, needs: str) -> int | None:
    """How many most likely tokens to give beside each sampled one, or ``None`` for no log-probs at all.

    Args:
        top_logprobs: of the request.
        wanted: whether it asks for log-probs.
        needs: how it would.
    """
    if top_logprobs is not None and not 0 <= top_logprobs <= 20:
        raise RequestError(f"top_logprobs={top_logprobs} must be from 0 to 20")
    if top_logprobs and not wanted:
        raise RequestError(f"top_logprobs={top_logprobs} needs {needs}")
    return (top_logprobs or 0) if wanted else None


def salted(prompt: PreparedPrompt, fields: SamplingFields) -> PreparedPrompt:
    """The prompt with the salt that its request asks for."""
    return prompt if fields.cache_salt is None else replace(prompt, salt=fields.cache_salt.encode())


def stream_content(model: type[BaseModel]) -> dict[str, Any]:
    """What the OpenAPI document says about a stream: the form of each event's data."""
    return {"text/event-stream": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


@contextmanager
def naming(body: RequestModel, **names: str) -> Iterator[None]:
    """Name fields in errors as the request does.

    Args:
        body: the request.
        names: its names for fields that the layers below call otherwise.
    """
    try:
        yield
    except RequestError as error:
        own = {name: name for name in type(body).model_fields}
        raise api_error_of(error, {**own, **names}) from error
