"""The app of the server, out of its parts: :func:`create_app`.

Routes, errors in one form, the OpenAPI document, and around it all the guards of :mod:`gapless.server.security`.
Called once, before the event loop takes requests.
"""

from copy import deepcopy
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

import gapless
from gapless.server.context import ServerContext
from gapless.server.endpoints.chat import chat_router
from gapless.server.endpoints.completions import completions_router
from gapless.server.endpoints.models import models_router
from gapless.server.endpoints.prompting import ChatPrompter
from gapless.server.endpoints.responses import responses_router
from gapless.server.endpoints.tokens import tokens_router
from gapless.server.error_bodies import ErrorBody, install_error_handlers, meaning_of
from gapless.server.protocol.chat import ChatChunk
from gapless.server.protocol.completions import CompletionChunk
from gapless.server.protocol.responses import ResponseEvent
from gapless.server.security import install

__all__ = ["ServerContext", "create_app"]

# Described where streams are; FastAPI knows only models of whole answers.
_EVENTS = (ChatChunk, CompletionChunk, ResponseEvent)
_JSON: Final = "application/json"
_ERROR: Final = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
# How a request may be refused before its endpoint sees it, and how one that has a body or makes work.
_REFUSED: Final = (401, 403, 503)
_REFUSED_POST: Final = (405, 408, 413, 429, 431, 504)


def _object(member: str) -> dict[str, Any]:
    return {"type": "object", "properties": {member: {"type": "string"}}, "required": [member]}


def _answer(description: str, schema: dict[str, Any], media_type: str = _JSON) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


def _operation(summary: str, **more: Any) -> dict[str, Any]:
    """A route of :mod:`gapless.server.probes`, which stands in front of the app."""
    return {"get": {"tags": ["operation"], "summary": summary, **more}}


def _probe(summary: str) -> dict[str, Any]:
    """One that asks for no key."""
    # While the model is being loaded nothing but an error is to be had.
    no = _answer("No.", {"anyOf": [_object("status"), _ERROR]})
    answers = {"200": _answer("Yes.", _object("status")), "503": no}
    return _operation(summary, security=[], responses=answers)


_PROBES: Final = {
    "/health": _probe("Whether the server and its engine live"),
    "/ready": _probe("Whether requests are taken"),
    "/version": _operation("The version of gapless", responses={"200": _answer("It.", _object("version"))}),
    "/metrics": _operation(
        "Figures for Prometheus",
        responses={"200": _answer("In its text format.", {"type": "string"}, "text/plain; version=0.0.4")},
    ),
}


def create_app(context: ServerContext) -> FastAPI:
    """The app for a model that is being served."""
    # Slashes are not added or taken away: a redirect would answer before anybody has asked for the key.
    app = FastAPI(
        title="gapless",
        version=gapless.__version__,
        summary="An OpenAI-compatible server for one model",
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    prompter = ChatPrompter(context.client.tokenizer, max_model_len=context.client.max_model_len)
    app.include_router(chat_router(context, prompter))
    app.include_router(completions_router(context))
    app.include_router(responses_router(context, prompter))
    app.include_router(models_router(context))
    app.include_router(tokens_router(context, prompter))
    install_error_handlers(app)
    _describe(app)
    install(app, context)
    return app


def _describe(app: FastAPI) -> None:
    """Have the OpenAPI document say what is true here: what is not valid is answered by 400 and never by 422."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
            document["paths"].update(deepcopy(_PROBES))
            for path in document["paths"].values():
                for method, operation in path.items():
                    operation["responses"] = _answers(method, operation)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            _, events = models_json_schema(
                [(model, "serialization") for model in _EVENTS], ref_template="#/components/schemas/{model}"
            )
            schemas.update(events["$defs"])
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _answers(method: str, operation: dict[str, Any]) -> dict[str, Any]:
    """All answers of an operation by status, those included that it gets before its endpoint sees it."""
    found = {status: answer for status, answer in operation["responses"].items() if status != "422"}
    if operation.get("security") != []:
        for status in (*_REFUSED, *(_REFUSED_POST if method == "post" else ())):
            found.setdefault(str(status), _answer(meaning_of(status), _ERROR))
    return dict(sorted(found.items()))
