"""From options to a checked :class:`Plan`: :func:`make_plan`, before any weight is read. Pure functions."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gapless.bench.workloads import Workload
from gapless.config import EngineConfig
from gapless.errors import ConfigError

__all__ = ["Plan", "make_plan"]

_MOST_ROWS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared.

    Args:
        model: its name, as for :class:`~gapless.LLM`.
        config: options of every engine; its depth is replaced.
        depths: most steps in flight, each at most once.
        workloads: each is run by each engine, in this order.
        repeats: rounds.
        seed: of the order of depths.

    Raises:
        ConfigError: naming what cannot be.
    """

    model: str
    config: EngineConfig
    depths: tuple[int, ...]
    workloads: tuple[Workload, ...]
    repeats: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.depths:
            raise ConfigError("no depth to measure: give at least one (--depth 1 2)")
        if len(set(self.depths)) < len(self.depths):
            raise ConfigError(f"depth={' '.join(map(str, self.depths))} names a depth twice: give each once")
        for depth in self.depths:
            replace(self.config, depth=depth)  # raises what is wrong with it
        if self.repeats < 1:
            raise ConfigError(f"repeats={self.repeats}: a benchmark needs at least 1")
        names = [workload.name for workload in self.workloads]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"the workload {twice[0]!r} is there twice: give each number of requests once")

    def rounds(self) -> list[list[int]]:
        """The depths of each round, in the order in which they run: shuffled, and rotated by one from round to round.

        So over as many rounds as there are depths each depth runs first, second and so on once.
        """
        order = random.Random(self.seed).sample(self.depths, len(self.depths))
        starts = [number % len(order) for number in range(self.repeats)]
        return [order[start:] + order[:start] for start in starts]


def make_plan(
    *,
    model: str,
    context: int,
    workloads: Sequence[Workload],
    depths: Sequence[int],
    repeats: int,
    seed: int,
    max_rows: int | None,
    max_model_len: int | None,
    engine: Mapping[str, Any],
) -> Plan:
    """Fill in what follows from the workloads, and check them against the model.

    Args:
        model: its name.
        context: positions that the model's configuration states.
        workloads: at least one.
        depths, repeats, seed: see :class:`Plan`.
        max_rows: ``None`` takes as many as the largest workload has requests, at most 512.
        max_model_len: ``None`` takes what the longest request needs and a block more, so that the KV cache, which is
            made for ``max_rows`` contexts of this length, holds them all.
        engine: the other options of :class:`EngineConfig`.

    Raises:
        ConfigError, PromptTooLongError: naming value, limit and remedy.
    """
    for workload in workloads:
        workload.check(context if max_model_len is None else max_model_len)
    longest = max(workload.longest_context for workload in workloads)
    if max_rows is None:
        max_rows = min(max(len(workload.requests) for workload in workloads), _MOST_ROWS)
    if max_model_len is None:
        max_model_len = min(context, longest + engine["block_size"])
    config = EngineConfig(**engine, max_rows=max_rows, max_model_len=max_model_len)
    return Plan(
        model=model,
        config=config,
        depths=tuple(depths),
        workloads=tuple(workloads),
        repeats=repeats,
        seed=seed,
    )
