"""What an operator asks a server: ``/health``, ``/ready``, ``/metrics`` and ``/version``.

The first two need no key. They tell nothing but whether the server lives and takes requests, and they never wait for
the engine: a busy server answers them as fast as an idle one. Belongs to the event loop.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import gapless
from gapless.errors import EngineDeadError

if TYPE_CHECKING:
    from gapless.server.context import ServerContext

__all__ = ["guarded_routes", "public_routes"]

_COUNTERS_TIMEOUT_S: Final = 1.0
_NO_STORE: Final = {"Cache-Control": "no-store"}


def public_routes(context: "ServerContext") -> list[Route]:
    """Routes that need no key."""

    async def health(request: Request) -> Response:
        if not context.client.alive:
            return JSONResponse({"status": "dead"}, 503, _NO_STORE)
        return JSONResponse({"status": "ok"}, 200, _NO_STORE)

    async def ready(request: Request) -> Response:
        if not context.client.alive:
            return JSONResponse({"status": "dead"}, 503, _NO_STORE)
        phase = context.gate.phase
        is_open = phase == "open"
        return JSONResponse({"status": "ready" if is_open else phase}, 200 if is_open else 503, _NO_STORE)

    return [Route("/health", health), Route("/ready", ready)]


def guarded_routes(context: "ServerContext") -> list[Route]:
    """Routes that need a key and answer also while the server drains."""

    async def metrics(request: Request) -> Response:
        await _refresh(context)
        return Response(context.metrics.expose(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": gapless.__version__})

    return [Route("/metrics", metrics), Route("/version", version)]


async def _refresh(context: "ServerContext") -> None:
    """Take over the engine's counts, or keep the last ones where a long step holds the answer up."""
    metrics = context.metrics
    try:
        async with asyncio.timeout(_COUNTERS_TIMEOUT_S):
            metrics.set_engine(await context.client.counters())
    except TimeoutError:
        pass
    except EngineDeadError:
        metrics.set_engine(None)
