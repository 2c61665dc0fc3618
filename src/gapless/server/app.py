"""The app of the server, out of its parts: :func:`create_app`.

Routes, errors in one form, the OpenAPI document, and around it all the guards of :mod:`gapless.server.security`.
Called once, before the event loop takes requests.
"""

from typing import Any

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
from gapless.server.error_bodies import install_error_handlers
from gapless.server.protocol.chat import ChatChunk
from gapless.server.protocol.completions import CompletionChunk
from gapless.server.protocol.responses import ResponseEvent
from gapless.server.security import install

__all__ = ["ServerContext", "create_app"]

# Described where streams are; FastAPI knows only models of whole answers.
_EVENTS = (ChatChunk, CompletionChunk, ResponseEvent)


def _probe(summary: str, member: str, *statuses: int) -> dict[str, Any]:
    """A route of :mod:`gapless.server.probes`, which stands in front of the app."""
    schema = {"type": "object", "properties": {member: {"type": "string"}}, "required": [member]}
    answers = {
        str(status): {"description": _PROBE_MEANINGS[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }
    return {"get": {"tags": ["operation"], "summary": summary, "security": [], "responses": answers}}


_PROBE_MEANINGS = {200: "Yes.", 503: "No."}
_PROBES = {
    "/health": _probe("Whether the server and its engine live", "status", 200, 503),
    "/ready": _probe("Whether requests are taken", "status", 200, 503),
    "/version": _probe("The version of gapless", "version", 200),
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
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            _, events = models_json_schema(
                [(model, "serialization") for model in _EVENTS], ref_template="#/components/schemas/{model}"
            )
            schemas.update(events["$defs"])
            document["paths"].update(_PROBES)
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
