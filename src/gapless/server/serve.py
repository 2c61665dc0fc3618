"""A server's life: :func:`run_server`, from the socket to the exit code.

::

    socket bound  ->  503 for everybody, the model loads  ->  open  ->  draining  ->  engine closed, exit

The port is taken before anything is loaded: a port in use costs nothing, and a load balancer sees 503 until the model
is there. The first SIGTERM or SIGINT drains: new requests get 503, running ones have their time, then they are cut off
with an error of their own. The second ends the process at once; the engine process ends with it. If the engine dies,
whoever waits is told and the process exits, for a supervisor to start it anew.

Everything happens in the event loop of the main thread. Exit codes are :class:`ExitCode`'s, or 128 + the signal.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from enum import IntEnum
from functools import partial
from typing import Final

import uvicorn
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from gapless.errors import GaplessError
from gapless.server.app import create_app
from gapless.server.context import ServerContext
from gapless.server.engine_client import ServedModelClient
from gapless.server.error_bodies import ApiError, error_response
from gapless.server.http_limits import BodyMemory, BoundedHttpProtocol, HttpLimits
from gapless.server.limits import RequestGate
from gapless.server.listening import allowed_connections
from gapless.server.logs import LogWriter, configure_logs, fields
from gapless.server.metrics import ServerMetrics
from gapless.server.settings import ServerSettings

__all__ = ["ExitCode", "run_server"]

_log = logging.getLogger("gapless.server")

# How long requests have to tell their clients that they were cut off, in seconds.
_LAST_WORDS_S: Final = 2
# Of an integer in a body, the least that Python can be told: 8 MiB of those with thousands would take it 0.2 s to read.
_MAX_DIGITS: Final = 640


class ExitCode(IntEnum):
    """How a server that could start has ended."""

    DRAINED = 0
    ENGINE_DIED = 70


def run_server(settings: ServerSettings, listener: socket.socket) -> int:
    """Serve until a signal or the engine's death, and return the exit code.

    Args:
        settings: of the server.
        listener: a socket that is listening, see :mod:`gapless.server.listening`.

    Raises:
        ConfigError: an option of the engine is impossible.
        CheckpointError: the model is missing, damaged or not supported.
        EngineDeadError: the engine ended while it was starting.
    """
    sys.set_int_max_str_digits(_MAX_DIGITS)
    writer = configure_logs(level=settings.log_level, json_lines=settings.log_json)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Server(settings, listener, writer).run())
    except GaplessError as error:
        if settings.log_json:  # the command's own last line is text
            _log.error("could not start", extra=fields(error=str(error)))
        raise
    finally:
        writer.finish()


class _LoadLog:
    """Tells the log about the stages of loading."""

    def stage(self, name: str) -> None:
        _log.info(name)

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        """Nothing: a log is no place for a bar."""


class _Door:
    """The app that uvicorn knows: the real one once there is a model, and until then one that says so."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        headers = {"Retry-After": "5", "Connection": "close"}
        error = ApiError(503, "the server is starting; try again soon", code="starting", headers=headers)
        await error_response(error)(scope, receive, send)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal does is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of a server."""

    def __init__(self, settings: ServerSettings, listener: socket.socket, writer: LogWriter) -> None:
        self._settings = settings
        self._listener = listener
        self._writer = writer
        self._gate = RequestGate(
            max_concurrent=settings.max_concurrent_requests, timeout_s=settings.request_timeout_s, phase="starting"
        )
        self._metrics = ServerMetrics(_model_name(settings))
        self._metrics.follow("http_requests_in_progress", lambda: self._gate.num_running)
        self._metrics.follow("draining", lambda: self._gate.phase == "draining")
        self._metrics.follow("log_lines_dropped_total", lambda: writer.num_dropped)
        self._door = _Door()
        self._uvicorn = _Uvicorn(self._uvicorn_config())
        self._signals: list[int] = []
        self._signalled = asyncio.Event()

    async def run(self) -> int:
        """Load, serve, end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        web = asyncio.create_task(self._uvicorn.serve(sockets=[self._listener]))
        try:
            client = await self._load()
            if client is None:
                return 128 + self._signals[0]
            try:
                return await self._serve(client, web)
            finally:
                await client.close()
        finally:
            self._uvicorn.should_exit = True
            await web

    async def _load(self) -> ServedModelClient | None:
        """Start the engine; ``None`` if a signal came before it was ready."""
        began_s = time.perf_counter()
        settings = self._settings
        _log.info("listening", extra=fields(address=_address(self._listener), model=settings.model))
        start = asyncio.create_task(
            ServedModelClient.start(
                settings.model,
                settings.engine,
                served_model_names=settings.served_model_names,
                chat_template=settings.chat_template,
                generation_config=settings.generation_config,
                override_generation_config=settings.override_generation_config or None,
                progress=_LoadLog(),
            )
        )
        interrupted = asyncio.create_task(self._signalled.wait())
        await asyncio.wait((start, interrupted), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await start
            _log.info("interrupted while loading")
            return None
        interrupted.cancel()
        client = start.result()
        told = {"max_model_len": client.max_model_len, "device": client.device, "dtype": client.dtype}
        _log.info(
            "ready", extra=fields(model=client.model_name, **told, after_s=round(time.perf_counter() - began_s, 1))
        )
        return client

    async def _serve(self, client: ServedModelClient, web: "asyncio.Task[None]") -> int:
        context = ServerContext(client=client, settings=self._settings, metrics=self._metrics, gate=self._gate)
        self._door.app = create_app(context)
        # What loading has made stays; later collections, which hold up every stream, need not look through it.
        gc.collect()
        gc.freeze()
        self._gate.phase = "open"
        died, signalled = asyncio.create_task(client.died.wait()), asyncio.create_task(self._signalled.wait())
        await asyncio.wait((died, signalled, web), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        signalled.cancel()
        if client.died.is_set():
            return await self._end_with_the_engine(client)
        await self._drain(client)
        return ExitCode.ENGINE_DIED if client.died.is_set() else ExitCode.DRAINED

    async def _drain(self, client: ServedModelClient) -> None:
        """Let running requests end, and cut off those that do not in time."""
        self._gate.phase = "draining"
        timeout_s = self._settings.drain_timeout_s
        _log.info("draining", extra=fields(running=self._gate.num_running, timeout_s=timeout_s))
        if not await self._gate.until_idle(timeout_s):
            _log.warning("cutting off", extra=fields(running=self._gate.num_running))
            self._gate.end_all()
            await self._gate.until_idle(_LAST_WORDS_S)
        _log.info("drained")

    async def _end_with_the_engine(self, client: ServedModelClient) -> int:
        """The engine is gone: everybody who waits hears of it, then the process ends."""
        self._gate.phase = "dead"
        _log.critical("the engine has died", extra=fields(cause=str(client.error)))
        if not await self._gate.until_idle(_LAST_WORDS_S):
            self._gate.end_all()
        return ExitCode.ENGINE_DIED

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        self._signalled.set()
        if len(self._signals) > 1:
            _log.warning("second signal: ending at once")
            self._writer.finish(0.2)
            os._exit(128 + number)  # nothing may wait here; the engine process ends with this one

    def _uvicorn_config(self) -> uvicorn.Config:
        settings = self._settings
        limits = HttpLimits(
            max_body_bytes=settings.max_body_bytes,
            max_held_body_bytes=settings.max_held_body_bytes,
            max_connections=allowed_connections(settings.max_connections),
        )
        memory = BodyMemory(limits.max_held_body_bytes)
        self._metrics.follow("http_held_body_bytes", lambda: memory.num_bytes)
        return uvicorn.Config(
            self._door,
            http=partial(BoundedHttpProtocol, limits, memory, self._metrics),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]
            timeout_graceful_shutdown=_LAST_WORDS_S,
        )


def _model_name(settings: ServerSettings) -> str:
    return settings.served_model_names[0] if settings.served_model_names else settings.model


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"
