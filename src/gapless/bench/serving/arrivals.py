"""When requests arrive: :class:`LoadLevel`, at a rate or so many at once. Pure functions of a seed."""

import math
import random
from dataclasses import dataclass
from typing import Literal

from gapless.errors import ConfigError

__all__ = ["LoadLevel", "poisson_arrivals_s"]

_RATE_SECONDS = 30.0
_LEAST_REQUESTS = 16
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadLevel:
    """How much load.

    Attributes:
        kind: ``rate`` is open-loop: so many requests arrive in a second, whatever the server makes of them.
            ``concurrency`` is closed-loop: so many are under way, and the next is sent when one has ended.
        value: requests a second, or requests under way.
    """

    kind: Literal["rate", "concurrency"]
    value: float

    def __post_init__(self) -> None:
        if not (self.value > 0 and math.isfinite(self.value)):
            raise ConfigError(f"{self.kind}={self.value} must be a positive number")
        if self.kind == "concurrency" and self.value != int(self.value):
            raise ConfigError(f"concurrency={self.value} must be a whole number of requests")

    @property
    def name(self) -> str:
        """As it stands in tables."""
        return f"{self.value:g}/s" if self.kind == "rate" else f"{self.value:g}"

    def num_requests(self) -> int:
        """How many requests make a useful measurement: half a minute of arrivals, or four rounds."""
        wanted = self.value * (_RATE_SECONDS if self.kind == "rate" else _ROUNDS)
        return max(_LEAST_REQUESTS, math.ceil(wanted))


def poisson_arrivals_s(rate: float, count: int, seed: int) -> list[float]:
    """Times of a Poisson process, in seconds from its start, with exponential gaps of ``1 / rate`` on average."""
    draw = random.Random(seed)
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times
