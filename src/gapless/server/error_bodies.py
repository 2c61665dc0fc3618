"""Errors as the OpenAI API writes them: ``{"error": {"message", "type", "param", "code"}}``, for every path out.

:class:`ApiError` is what an endpoint raises; :func:`api_error_of` makes one out of the errors of the layers below;
:func:`install_error_handlers` has FastAPI answer with it, also where FastAPI itself refuses a request. A body never
holds a path, a trace or the text of an exception that nobody expected, and of a client's value no more than a glimpse.

Pure functions; used in the API process, in any thread.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gapless.errors import (
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    RequestFailedError,
    shown,
)
from gapless.server.logs import request_fields

__all__ = [
    "CLIENT_CLOSED_REQUEST",
    "ApiError",
    "ErrorBody",
    "ErrorDetail",
    "api_error_of",
    "error_content",
    "error_response",
    "error_responses",
    "install_error_handlers",
    "meaning_of",
    "model_not_found",
]

CLIENT_CLOSED_REQUEST: Final = 499
"""The status of an answer that nobody is there to read."""

_log = logging.getLogger("gapless.server")

_MAX_MESSAGE_CHARACTERS = 600
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MEANINGS: Final = {
    400: "The request is not valid; the message names the field.",
    401: "The API key is missing or wrong.",
    403: "The `Host` header is not accepted.",
    404: "The model does not exist here.",
    405: "The route takes another method.",
    408: "The request came too slowly.",
    413: "The body is larger than the server takes.",
    429: "Too many requests wait already; try again after `Retry-After` seconds.",
    431: "The head is larger than the server takes.",
    500: "The request failed on the server.",
    503: "The server is loading or shutting down, or its engine has ended.",
    504: "The request took longer than the server allows.",
}
# A message of the layers below starts with the field that it is about: "top_k=-2 must be", "prompt[3] is empty".
_LEADING_FIELD: Final = re.compile(r"[a-z][a-z0-9_]*(?:\[\d+\]|\.[a-z_][a-z0-9_]*)*")

# What EngineDeadError says of its cause; behind it may stand the text of an exception, or the requests of a step.
_ENDS_OF_ENGINES: Final = re.compile(
    r"the engine process (?:was killed by (?:SIG\w+|signal \d+)|ended with status \d+)"
    r"|the engine loop ended: [A-Za-z_]\w*|a step did not come back within [\d.e+]+ s|the engine was shut down"
)


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="For people: the value, the limit and the remedy.")
    type: str = Field(description="The kind of error, such as `invalid_request_error`.")
    param: str | None = Field(description="The field that is wrong, if one is.")
    code: str | None = Field(description="For programs, such as `model_not_found`.")


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: for people; cut if it is very long.
        param: the field that is wrong.
        code: for programs.
        kind: the ``type`` in the body; by default the one that fits the status.
        headers: of the answer, such as ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(message)
        self.param = param
        self.code = code
        self.kind = kind or _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
        self.headers = dict(headers or {})


def error_content(error: ApiError) -> bytes:
    """The JSON body of an error."""
    detail = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": detail})


def error_response(error: ApiError) -> Response:
    """The whole answer."""
    return Response(error_content(error), error.status, error.headers, "application/json")


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What an endpoint's OpenAPI document says about its errors."""
    return {status: {"model": ErrorBody, "description": meaning_of(status)} for status in statuses}


def meaning_of(status: int) -> str:
    """What the OpenAPI document says of an error's status."""
    return _MEANINGS[status]


def api_error_of(error: BaseException, fields: Mapping[str, str] | None = None) -> ApiError:
    """The answer to an error of the layers below.

    Args:
        error: what was raised.
        fields: the request's fields, by the names that messages of the layers below start with.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else "invalid_value"
        return ApiError(400, str(error), param=_param_of(str(error), fields or {}), code=code)
    if isinstance(error, EngineDeadError):
        message = f"{_end_of_engine(error)}; no request can be served until the server is started again"
        return ApiError(503, message, code="engine_dead", headers={"Retry-After": "10"})
    if isinstance(error, RequestFailedError):
        return ApiError(500, str(error), code="request_failed")
    _log.error("an error that nobody expected", exc_info=error, extra=request_fields())
    return ApiError(500, "the server failed on this request; its log has the reason", code="internal_error")


def _end_of_engine(error: EngineDeadError) -> str:
    """How the engine has ended, as far as a client may know it: no text of an exception, which may show anything."""
    known = _ENDS_OF_ENGINES.match(str(error))
    return "the engine has ended" if known is None else known[0]


def model_not_found(name: str) -> ApiError:
    """The answer for a model that is not served here."""
    message = f"the model {shown(name)} does not exist here; /v1/models lists those that do"
    return ApiError(404, message, param="model", code="model_not_found")


def install_error_handlers(app: FastAPI) -> None:
    """Have an app answer every error in this form."""

    async def any_error(request: Request, error: Exception) -> Response:
        return error_response(api_error_of(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(_validation_error(error.errors()))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return error_response(_http_error(request, error))

    async def client_is_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_is_gone)
    for kind in (ApiError, RequestError, RequestFailedError, EngineDeadError, Exception):
        app.add_exception_handler(kind, any_error)


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's findings: more of them would only repeat it for each member of a union."""
    first = errors[0]
    place = [part for part in first["loc"] if part != "body"]
    param = _path(place) or None
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not a field of this request; remove it", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{param or 'the body'} is missing; give it", param=param, code="missing_field")
    if first["type"] == "value_error":  # of gapless.server.protocol.fields.Only, whose message starts with the value
        return ApiError(400, f"{param}={first['ctx']['error']}", param=param, code="unsupported")
    message = str(first["msg"])
    message = f"{message[:1].lower()}{message[1:]}"
    glimpse = f"={shown(first['input'])}" if isinstance(first.get("input"), str | int | float | bool) else ""
    subject = f"{param}{glimpse}" if param else "the body"
    return ApiError(400, f"{subject}: {message}", param=param, code="invalid_value")


def _http_error(request: Request, error: HTTPException) -> ApiError:
    headers = error.headers
    if error.status_code == 404:
        return ApiError(404, f"there is nothing at {shown(request.url.path)}", code="not_found", headers=headers)
    if error.status_code == 405:
        allowed = (headers or {}).get("allow") or (headers or {}).get("Allow")
        message = f"the method {shown(request.method)} is not allowed here" + (f"; use {allowed}" if allowed else "")
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, str(error.detail), headers=headers)


def _path(place: Sequence[str | int]) -> str:
    path = ""
    for part in place:
        path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{shown(part)[1:-1]}"
    return path


def _param_of(message: str, fields: Mapping[str, str]) -> str | None:
    found = _LEADING_FIELD.match(message)
    if found is None or message[found.end() : found.end() + 1] not in (" ", "=", ":"):
        return None
    root = re.split(r"[\[.]", found[0], maxsplit=1)[0]
    return fields[root] + found[0][len(root) :] if root in fields else None


def _cut(message: str) -> str:
    text = message.encode("utf-8", errors="replace").decode()
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[: _MAX_MESSAGE_CHARACTERS - 3] + "..."
