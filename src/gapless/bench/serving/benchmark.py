"""The whole benchmark: :func:`run_benchmark` finds the model, warms the server up, and runs level after level."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from gapless.bench.serving.arrivals import LoadLevel
from gapless.bench.serving.http_client import HttpClient
from gapless.bench.serving.load import LevelRun, run_level
from gapless.bench.serving.options import ServingOptions
from gapless.bench.serving.sending import RequestRecord, error_message
from gapless.errors import GaplessError

__all__ = ["ServerError", "ServingRun", "Stage", "run_benchmark"]


class ServerError(GaplessError):
    """The server cannot be measured; the message has its own words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What is being run: ``name``, for progress, and how many requests it has."""

    name: str
    requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRun:
    """All levels, in the order in which they ran; ``model`` is the name that requests had."""

    model: str
    levels: tuple[LevelRun, ...]


async def run_benchmark(
    options: ServingOptions,
    *,
    api_key: str | None = None,
    on_stage: Callable[[Stage], None] = lambda stage: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> ServingRun:
    """Run all levels, the next one when nothing of the last is under way any more.

    Args:
        options: what to do.
        api_key: sent as a bearer token.
        on_stage: told what begins.
        on_done: told of each request that has ended in that stage.

    Raises:
        HttpError: the server cannot be reached.
        ServerError: it lists no model, or fails the warm-up, so that it would fail everything.
        InputError, ConfigError, OSError: the file of prompts cannot be used.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with HttpClient(options.origin, headers=headers) as client:
        model = options.model or await _first_model(client)

        async def run(level: LoadLevel, place: int, count: int, name: str) -> LevelRun:
            requests = options.make_requests(place, count, model)
            on_stage(Stage(name=name, requests=count))
            seed = options.seed + place
            return await run_level(client, level, requests, seed=seed, timeout_s=options.timeout_s, on_done=on_done)

        if options.warm_up:
            alone = LoadLevel(kind="concurrency", value=1)
            _check_warm_up(client, await run(alone, 0, options.warm_up, "warm up"))
        levels = [
            await run(level, place, options.num_requests(level), f"{level.kind} {level.name}")
            for place, level in enumerate(options.levels(), 1)
        ]
    return ServingRun(model=model, levels=tuple(levels))


def _check_warm_up(client: HttpClient, run: LevelRun) -> None:
    failed = next((record for record in run.records if not record.is_complete), None)
    if failed is None:
        return
    if failed.failure == "no connection":
        raise ServerError(failed.detail)
    raise ServerError(f"{client.origin} failed the warm-up with {failed.failure}: {failed.detail}")


async def _first_model(client: HttpClient) -> str:
    """The name of the first model that the server lists."""
    async with client.request("GET", "/models") as response:
        body = await response.body()
    try:
        answer = json.loads(body)
    except ValueError:
        answer = body.decode("utf-8", errors="replace")
    if response.status != 200:
        raise ServerError(
            f"{client.origin}/models answers with HTTP {response.status}: {error_message(answer)}; check --url, give "
            "the key with --api-key, or name the model with --model"
        )
    models = answer.get("data") if isinstance(answer, dict) else None
    first = models[0] if isinstance(models, list) and models else None
    if not isinstance(first, dict) or not isinstance(first.get("id"), str):
        raise ServerError(f"{client.origin}/models lists no model: name it with --model")
    return str(first["id"])
