"""What a serving benchmark is told: :class:`ServingOptions`, checked where they are given and frozen from then on."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gapless.bench.serving.arrivals import LoadLevel
from gapless.bench.serving.http_client import Origin
from gapless.bench.serving.prompts import PATHS, Endpoint, ServingRequest, file_requests, random_requests
from gapless.errors import ConfigError

__all__ = ["ServingOptions"]

# Levels have prompts of their own, and so has the warm-up, or a later level would find an earlier one's in the cache.
_SEED_STEP = 1_000_003


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingOptions:
    """Where load goes, how much of it, and of what.

    Args:
        url: of the server; ``/v1`` is added if it has no path.
        rates: levels of open-loop load, requests a second. Either these or ``concurrencies``.
        concurrencies: levels of closed-loop load, requests under way.
        endpoint: ``completions`` or ``chat``.
        model: its name on the server; ``None`` is the first that the server lists.
        input_file: prompts as JSONL; ``None`` for random ones.
        requests: at each level; ``None`` leaves it to the level.
        prompt_tokens, new_tokens: of a random prompt and of its answer; the latter for a file's lines that do not say.
        ignore_eos: ask for answers of exactly ``new_tokens``.
        warm_up: requests that are sent first and not measured.
        timeout_s: for one answer, in seconds.
        seed: of prompts and arrivals.

    Raises:
        ConfigError: naming option and value.
    """

    url: str
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    endpoint: str = "completions"
    model: str | None = None
    input_file: Path | None = None
    requests: int | None = None
    prompt_tokens: int = 256
    new_tokens: int = 128
    ignore_eos: bool = True
    warm_up: int = 2
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.rates) == bool(self.concurrencies):
            raise ConfigError("give levels of load by --rate or by --concurrency, and not by both")
        if self.endpoint not in PATHS:
            raise ConfigError(f"endpoint={self.endpoint!r} is unknown; use one of {', '.join(PATHS)}")
        for name, value, least in (
            ("requests", self.requests, 1),
            ("prompt-tokens", self.prompt_tokens, 1),
            ("new-tokens", self.new_tokens, 1),
            ("warm-up", self.warm_up, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} must be at least {least}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout={self.timeout_s} must be a positive time")
        # Both refuse what they cannot be made of.
        Origin.parse(self.url)
        self.levels()

    @property
    def origin(self) -> Origin:
        """Where requests go."""
        origin = Origin.parse(self.url)
        return origin if origin.prefix else replace(origin, prefix="/v1")

    def levels(self) -> list[LoadLevel]:
        """The levels, in the order in which they run."""
        rates = [LoadLevel(kind="rate", value=rate) for rate in self.rates]
        return rates + [LoadLevel(kind="concurrency", value=count) for count in self.concurrencies]

    def num_requests(self, level: LoadLevel) -> int:
        """How many requests a level has."""
        return self.requests or level.num_requests()

    def make_requests(self, place: int, count: int, model: str | None) -> list[ServingRequest]:
        """Requests of a level, or with ``place`` 0 of the warm-up.

        Raises:
            InputError, ConfigError, OSError: the file cannot be used.
        """
        endpoint = cast(Endpoint, self.endpoint)
        sizes: dict[str, Any] = {"count": count, "new_tokens": self.new_tokens, "model": model}
        if self.input_file is not None:
            return file_requests(self.input_file, endpoint, **sizes)
        return random_requests(
            endpoint,
            prompt_tokens=self.prompt_tokens,
            seed=self.seed + _SEED_STEP * place,
            ignore_eos=self.ignore_eos,
            **sizes,
        )

    def check_input(self) -> None:
        """Refuse a file that cannot be used, before anything is sent.

        Raises:
            InputError, ConfigError, OSError: as :meth:`make_requests`.
        """
        if self.input_file is not None:
            self.make_requests(0, 1, None)
