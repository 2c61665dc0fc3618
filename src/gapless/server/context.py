"""What every endpoint needs: :class:`ServerContext`, made once when the server starts."""

import time
from dataclasses import dataclass, field

from gapless.server.engine_client import ServedModelClient
from gapless.server.limits import RequestGate
from gapless.server.metrics import ServerMetrics
from gapless.server.settings import ServerSettings

__all__ = ["ServerContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerContext:
    """The parts of a running server; all belong to its event loop.

    Attributes:
        client: the model and its engine.
        settings: fixed at the start.
        metrics: hears of every generation.
        gate: counts running requests and knows whether the server is draining.
        started_at: seconds since 1970.
    """

    client: ServedModelClient
    settings: ServerSettings
    metrics: ServerMetrics
    gate: RequestGate
    started_at: int = field(default_factory=lambda: int(time.time()))
