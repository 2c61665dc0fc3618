"""How a decode step grows with requests and context: :func:`measure_growth`, a table of steady steps.

To reach a context of 32 thousand tokens by generating it would take hours for the whole table, so no prompt is
computed: steps are handed to the engine's own ring with block tables over blocks that hold random numbers, and lengths
that claim the context. What the device does is then the same as in service, byte for byte (a step's work does not
depend on values), through the same step buffers, graphs and kernels. The host's part is taken from real runs of as many
requests, since the scheduler has no part in such steps; it does not depend on the context. Used by one thread, while
the engine has no request of its own.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from gapless.bench.figures import median_of, percentile
from gapless.bench.measured_engine import MeasuredEngine
from gapless.bench.progress import BenchProgress
from gapless.bench.workloads import Lengths, synthetic_workload
from gapless.config import EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.results import RequestUpdate
from gapless.errors import ConfigError, EngineDeadError
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch, TableChange
from gapless.pipeline.padding import idle_decode_batch
from gapless.pipeline.ring import Ring
from gapless.timeline.roofline import min_read_bytes
from gapless.timeline.spans import DeviceLimits

__all__ = ["Cell", "Growth", "GrowthPlan", "StepDriver", "measure_growth"]

CellState = Literal["run", "does not fit", "beyond the context", "not run"]

_HOST_PROMPT_TOKENS = 8
_LEAST_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthPlan:
    """What is measured.

    Args:
        model: its name.
        config: of the engine; its numbers of rows and its context are replaced.
        requests, contexts: the cells; tokens of context a request, the new one included.
        steps: of a cell.
        budget_s: a cell gets fewer steps if they would take longer, and none if one step does.

    Raises:
        ConfigError: naming the value.
    """

    model: str
    config: EngineConfig
    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int = 32
    budget_s: float = 10.0

    def __post_init__(self) -> None:
        for name, values in (("requests", self.requests), ("contexts", self.contexts), ("steps", (self.steps,))):
            if not values or min(values) < 1:
                raise ConfigError(f"{name}={' '.join(map(str, values))}: each must be at least 1")
        if not self.budget_s > 0:
            raise ConfigError(f"budget_s={self.budget_s} must be positive")

    @property
    def num_rows(self) -> int:
        """Rows of the engine."""
        return max(self.requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One number of requests at one context.

    Attributes:
        state: ``run``, or why there are no figures.
        device_s, device_p90_s: of a step.
        floor_s: the least time in which what such a step must read can be read.
        num_steps: how many were measured.
    """

    requests: int
    context: int
    state: CellState
    device_s: float | None = None
    device_p90_s: float | None = None
    floor_s: float | None = None
    num_steps: int = 0

    @property
    def roofline_share(self) -> float | None:
        """Floor over time, 0 to 1."""
        return None if self.device_s is None or self.floor_s is None else self.floor_s / self.device_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """The table, and the host's time for a decode step by number of requests."""

    plan: GrowthPlan
    cells: tuple[Cell, ...]
    host_s: dict[int, float | None]
    read_bytes_per_s: float
    kv_capacity: int

    def cell(self, requests: int, context: int) -> Cell:
        """One of the cells."""
        return next(cell for cell in self.cells if (cell.requests, cell.context) == (requests, context))


def measure_growth(plan: GrowthPlan, progress: BenchProgress) -> Growth:
    """Measure every cell, and the host.

    Raises:
        ConfigError, CheckpointError: the engine cannot be built.
    """
    host_config = replace(plan.config, max_rows=plan.num_rows, max_model_len=_host_context(plan))
    host_s: dict[int, float | None] = {}
    progress.stage("start")
    with MeasuredEngine(plan.model, host_config) as engine:
        bandwidth, limits = engine.read_bytes_per_s, engine.timeline.recording().limits
        for count in plan.requests:
            progress.stage(f"host: {count} requests")
            host_s[count] = _host_step_s(engine, plan, count)
    cells: list[Cell] = []
    # A recorder would want to hear from the scheduler of every step; here nobody schedules.
    device_config = replace(plan.config, max_rows=plan.num_rows, max_model_len=None, timeline=False)
    built = build_engine(plan.model, device_config, _Nobody())
    try:
        driver = StepDriver(built, plan)
        for requests, context in ((r, c) for r in plan.requests for c in plan.contexts):
            progress.stage(f"device: {requests} requests of {context} tokens")
            cells.append(driver.measure(requests, context, limits, bandwidth))
    finally:
        built.engine.shutdown()
    return Growth(
        plan=plan, cells=tuple(cells), host_s=host_s, read_bytes_per_s=bandwidth, kv_capacity=built.kv_capacity
    )


def _host_context(plan: GrowthPlan) -> int:
    return _HOST_PROMPT_TOKENS + plan.steps + plan.config.block_size


def _host_step_s(engine: MeasuredEngine, plan: GrowthPlan, count: int) -> float | None:
    workload = synthetic_workload(
        requests=count,
        prompt=Lengths(mean=_HOST_PROMPT_TOKENS),
        new=Lengths(mean=plan.steps),
        vocab_size=engine.built.loaded.spec.vocab_size,
    )
    engine.warm_up(workload)
    return engine.run(workload, repeat=1).steps.decode_host_s


class _Nobody:
    """The sink of an engine that gets no requests."""

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        assert not updates

    def engine_died(self, error: EngineDeadError) -> None:
        """Its end shows in the ring."""


class StepDriver:
    """Hands steps that nobody scheduled to an engine's ring."""

    def __init__(self, built: BuiltEngine, plan: GrowthPlan) -> None:
        self._built = built
        self._plan = plan
        self._on_cuda = built.loaded.model.device.type == "cuda"
        _fill_with_noise(built, max((self._num_blocks(r, c) for r, c in self._fitting()), default=0))

    def measure(self, requests: int, context: int, limits: DeviceLimits, read_bytes_per_s: float) -> Cell:
        """Run the steps of one cell."""
        state = self._state(requests, context)
        if state != "run":
            return Cell(requests=requests, context=context, state=state)
        ring = self._built.ring
        for batch in self._table_steps(requests, context):
            _run(ring, batch, 1)
        batch = self._decode_step(requests, context)
        if self._on_cuda:
            _run(ring, batch, 2 * self._plan.config.depth)  # captures a graph over each set of buffers
        began_s = time.perf_counter()
        _run(ring, batch, 1)
        step_s = time.perf_counter() - began_s
        if step_s > self._plan.budget_s:
            return Cell(requests=requests, context=context, state="not run")
        num_steps = max(_LEAST_STEPS, min(self._plan.steps, int(self._plan.budget_s / step_s)))
        busy_s = _run(ring, batch, num_steps)
        window = min(context, limits.window or context)
        floor = min_read_bytes(limits, num_context_tokens=requests * context, num_window_tokens=requests * window)
        return Cell(
            requests=requests,
            context=context,
            state="run",
            device_s=median_of(busy_s),
            device_p90_s=percentile(busy_s, 90),
            floor_s=floor / read_bytes_per_s,
            num_steps=len(busy_s),
        )

    def _state(self, requests: int, context: int) -> CellState:
        if context > self._built.loaded.config_max_model_len:
            return "beyond the context"
        if context > self._built.max_model_len or self._num_blocks(requests, context) > self._built.num_blocks:
            return "does not fit"
        return "run"

    def _fitting(self) -> Iterator[tuple[int, int]]:
        for requests in self._plan.requests:
            for context in self._plan.contexts:
                if self._state(requests, context) == "run":
                    yield requests, context

    def _num_blocks(self, requests: int, context: int) -> int:
        return requests * -(-context // self._plan.config.block_size)

    def _table_steps(self, requests: int, context: int) -> Iterator[ScheduledBatch]:
        """Steps in which nobody takes part, and which set the rows' block tables: blocks of their own, in disorder."""
        columns = -(-context // self._plan.config.block_size)
        blocks = np.random.default_rng(0).permutation(requests * columns) + 1  # block 0 is reserved
        changes = [
            TableChange(row, column, int(blocks[row * columns + column]))
            for row in range(requests)
            for column in range(columns)
        ]
        most = self._plan.config.for_device(self._built.loaded.model.device.type).step_tokens
        idle = idle_decode_batch(1, self._plan.num_rows)
        for start in range(0, len(changes), most):
            yield replace(idle, table_changes=tuple(changes[start : start + most]))

    def _decode_step(self, requests: int, context: int) -> ScheduledBatch:
        """A step in which each row takes its last token as input and samples the next one, padded as in service."""
        builder = BatchBuilder(-1)
        for row in range(requests):
            entry = BatchEntry(
                request_id=row,
                residency=0,
                row=row,
                start=context - 1,
                num_tokens=1,
                final=True,
                samples=True,
                carries=True,
                output_position=0,
            )
            builder.add_token(entry, 0)
        batch, buckets = builder.build(), self._built.buckets
        return batch if buckets is None else buckets.pad(batch)


def _run(ring: Ring, batch: ScheduledBatch, count: int) -> Sequence[float]:
    """Run a step some times with as many in flight as the ring has room for; returns the device's time for each."""
    busy_s = []
    for _ in range(count):
        if not ring.has_room:
            busy_s.append(ring.collect().result.busy_s)
        ring.submit(batch)
    while ring.num_in_flight:
        busy_s.append(ring.collect().result.busy_s)
    return busy_s


def _fill_with_noise(built: BuiltEngine, num_blocks: int) -> None:
    """Random keys and values: a GPU at its power limit runs faster on zeros than on numbers that change."""
    slots = (num_blocks + 1) * built.kv.block_size
    numbers = torch.Generator(built.loaded.model.device).manual_seed(0)
    for tensor in (*built.kv.keys, *built.kv.values):
        tensor[:slots].normal_(generator=numbers)
    if built.loaded.model.device.type == "cuda":
        torch.cuda.synchronize()
