"""Putting an app behind its guards: :func:`install`; and what its endpoints may ask about a request.

The guards themselves are :class:`~gapless.server.front.Front` (key, host, load) and, in the connection below it,
:class:`~gapless.server.http_limits.BoundedHttpProtocol`. Used in the event loop.
"""

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request

from gapless.server.front import Front

if TYPE_CHECKING:
    from gapless.server.context import ServerContext

__all__ = ["install", "request_id_of", "salt_of"]


def install(app: FastAPI, context: "ServerContext") -> None:
    """Guard an app; called once, when it has all its routes and middleware."""
    app.add_middleware(Front, context=context)
    origins = context.settings.cors_origins
    if origins:
        # Outermost, since a browser asks before it sends a key, and must be able to read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )


def salt_of(request: Request) -> bytes:
    """The prefix cache's salt for the request's key; empty where no keys are set."""
    salt: bytes = request.scope["state"]["salt"]
    return salt


def request_id_of(request: Request) -> str:
    """The request's id: the client's ``X-Request-Id`` if it is a sane one, else one of ours."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id
