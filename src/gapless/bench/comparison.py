"""Depths side by side: :func:`compare_depths` runs them in one process, :class:`Comparison` holds what came out.

In every round each depth gets an engine of its own, one after another in an order drawn from a seed, so that whatever
drifts (clocks, heat, neighbours on the machine) meets all depths alike, and a model that fits once is enough. Building
and warming up are not part of the time. Used by one thread.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

from gapless.bench.figures import RunFigures
from gapless.bench.measured_engine import MeasuredEngine
from gapless.bench.plan import Plan
from gapless.bench.progress import BenchProgress
from gapless.errors import GaplessError
from gapless.timeline.spans import Recording

__all__ = ["Comparison", "Difference", "TokensDifferError", "compare_depths"]

_log = logging.getLogger("gapless.bench")
_engine_log = logging.getLogger("gapless")


class TokensDifferError(GaplessError):
    """Runs that owe the same tokens gave different ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The first token in which two runs differ; ``position`` counts from 0 in the request's output."""

    workload: str
    request: int
    position: int
    depths: tuple[int, int]

    def __str__(self) -> str:
        first, second = self.depths
        runs = "two runs of depth {}" if first == second else "depth {} and depth {}"
        return f"{runs.format(first, second)} differ in request {self.request} at output position {self.position}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All runs of a plan, in the order in which they ran.

    Attributes:
        least_bytes: for each workload, what any engine must read.
        read_bytes_per_s: the device's read bandwidth, the best of what was measured.
    """

    plan: Plan
    runs: tuple[RunFigures, ...]
    least_bytes: dict[str, int]
    read_bytes_per_s: float

    def runs_of(self, depth: int, workload: str) -> list[RunFigures]:
        """The runs of one depth and one workload, by round."""
        return [run for run in self.runs if run.depth == depth and run.workload == workload]

    def floor_s(self, workload: str) -> float:
        """The least time in which this device can read what a workload must read."""
        return self.least_bytes[workload] / self.read_bytes_per_s

    @property
    def difference(self) -> Difference | None:
        """Where runs of a workload gave other tokens than its first run, if any did."""
        for workload in self.plan.workloads:
            first, *others = [run for run in self.runs if run.workload == workload.name]
            for run in others:
                found = _first_difference(first, run)
                if found is not None:
                    return found
        return None

    @property
    def must_agree(self) -> bool:
        """Whether all depths owe the same tokens: their steps had the same shapes, or would have, but for a fault."""
        return all(
            all(run.has_fixed_steps for run in runs) or len({run.steps_digest for run in runs}) == 1
            for workload in self.plan.workloads
            if (runs := [run for run in self.runs if run.workload == workload.name])
        )

    def check_tokens(self) -> None:
        """Raise :class:`TokensDifferError` if runs that must agree do not."""
        difference = self.difference
        if difference is not None and self.must_agree:
            raise TokensDifferError(f"{difference}, and they owe the same tokens: please report this")


def compare_depths(
    plan: Plan, progress: BenchProgress, keep: Callable[[RunFigures, Recording], None] = lambda run, recording: None
) -> Comparison:
    """Run every depth of a plan in every round.

    Args:
        plan: what to run.
        progress: is told how far it is.
        keep: is shown each run with its timeline, between two runs.

    Raises:
        ConfigError, CheckpointError: an engine cannot be built.
        RequestError: it cannot serve the workload.
        EngineDeadError: a run failed.
    """
    runs: list[RunFigures] = []
    least_bytes: dict[str, int] = {}
    read_bytes_per_s = 0.0
    for number, depths in enumerate(plan.rounds(), 1):
        for depth in depths:
            name = f"depth {depth}" + (f", round {number} of {plan.repeats}" if plan.repeats > 1 else "")
            progress.stage(f"{name}: start")
            with _quiet_start() if runs else nullcontext():
                made = MeasuredEngine(plan.model, replace(plan.config, depth=depth))
            with made as engine:
                read_bytes_per_s = max(read_bytes_per_s, engine.read_bytes_per_s)
                for workload in plan.workloads:
                    progress.stage(f"{name}: warm up")
                    engine.warm_up(workload)
                    progress.stage(f"{name}: {workload.name}")
                    run = engine.run(workload, repeat=number, progress=progress.share_callback)
                    least_bytes[workload.name] = engine.least_bytes(workload)
                    _log.info(
                        "%s: %s in %.2f s, %.1f tokens/s, device active %.1f %%",
                        name,
                        workload.name,
                        run.seconds,
                        run.output_tokens_per_s,
                        100 * run.active_share,
                    )
                    runs.append(run)
                    keep(run, engine.last_run())
    return Comparison(plan=plan, runs=tuple(runs), least_bytes=least_bytes, read_bytes_per_s=read_bytes_per_s)


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Keep an engine from telling again what the first one has told; its warnings pass."""

    def is_news(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING

    _engine_log.addFilter(is_news)
    try:
        yield
    finally:
        _engine_log.removeFilter(is_news)


def _first_difference(first: RunFigures, other: RunFigures) -> Difference | None:
    for index, (one, two) in enumerate(zip(first.token_ids, other.token_ids, strict=True)):
        if one != two:
            return Difference(
                workload=first.workload,
                request=index,
                position=_common_length(one, two),
                depths=(first.depth, other.depth),
            )
    return None


def _common_length(one: Sequence[int], two: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
