"""An engine under measurement: :class:`MeasuredEngine` builds it, warms it up, runs workloads and tells what it saw.

Figures come from the engine's own counters, its device activity and its timeline; nothing is patched, and the timed
part holds no work of the benchmark's but a hash of each step's shape. It is used by one thread; the engine's thread
reaches it through the sink only.
"""

import gc
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import torch

from gapless.bench.figures import RequestFigures, RunFigures
from gapless.bench.step_figures import least_bytes, step_figures
from gapless.bench.workloads import Workload
from gapless.config import EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.engine import EngineCounters
from gapless.engine.request import EngineRequest
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError, RequestFailedError
from gapless.pipeline.batch import ScheduledBatch
from gapless.timeline.recorder import TimelineRecorder
from gapless.timeline.spans import Recording

__all__ = ["MeasuredEngine", "give_memory_back"]

_POLL_S = 0.1
_WARM_UP_TOKENS = 32
_WARM_UP_REQUESTS = 4


def give_memory_back() -> None:
    """Collect what an engine that has ended has left, and return the GPU's share of it to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _collector_has_little_to_do() -> Iterator[None]:
    """As in the command line's own processes: what is there already is not looked through in the middle of a run.

    A full collection over all that the imports have made holds up the engine's thread for 0.2 s.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Run:
    """The sink: what became of the requests of one run, written by the engine's thread."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.ends: dict[int, RequestUpdate] = {}
        self.token_times_s: dict[int, list[float]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._wanted = 0
        self._error: EngineDeadError | None = None

    def begin(self, count: int) -> None:
        self._wanted = count
        self.ends, self.token_times_s, self._token_ids = {}, {}, {}
        self.done.clear()

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        now_s = time.perf_counter()
        for update in updates:
            self._token_ids.setdefault(update.request_id, []).extend(update.token_ids)
            self.token_times_s.setdefault(update.request_id, []).extend(now_s for _ in update.token_ids)
            if update.finish_reason is not None:
                self.ends[update.request_id] = update
        if len(self.ends) == self._wanted:
            self.done.set()

    def engine_died(self, error: EngineDeadError) -> None:
        self._error = error
        self.done.set()

    def check(self) -> None:
        if self._error is not None:
            raise self._error
        for update in self.ends.values():
            if update.error is not None:
                raise RequestFailedError(f"request {update.request_id} failed: {update.error}")

    def request_figures(self, request_id: int, source: EngineRequest) -> RequestFigures:
        update = self.ends[request_id]
        metrics, times_s = update.metrics, self.token_times_s[request_id]
        assert metrics.ttft_s is not None
        assert metrics.finished_s is not None
        return RequestFigures(
            num_prompt_tokens=len(source.prompt_token_ids),
            num_tokens=len(times_s),
            ttft_s=metrics.ttft_s,
            tpot_s=metrics.tpot_s(len(times_s)),
            end_to_end_s=metrics.finished_s - metrics.arrived_s,
            itl_s=tuple(b - a for a, b in itertools.pairwise(times_s)) if source.streams else (),
            ended_by_length=update.finish_reason == "length",
        )

    def token_ids(self, request_id: int) -> tuple[int, ...]:
        return tuple(self._token_ids[request_id])


class _Shapes:
    """A running digest of the steps' shapes; called in the engine's thread."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    def note(self, batch: ScheduledBatch) -> None:
        shape = (len(batch.input_ids), len(batch.rows), len(batch.sample_rows))
        self._digest.update(b"%d,%d,%d;" % shape)

    def restart(self) -> None:
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class MeasuredEngine:
    """One engine at one depth; a context manager that frees its memory.

    Args:
        model: its name, as for :func:`~gapless.engine.assembly.build_engine`.
        config: the engine's options.

    Attributes:
        read_bytes_per_s: the device's read bandwidth, measured before anything ran.

    Raises:
        ConfigError, CheckpointError: it cannot be built.
    """

    def __init__(self, model: str, config: EngineConfig) -> None:
        self.config = config
        self._run = _Run()
        self._shapes = _Shapes()
        self._first_step = 0
        config = replace(config, timeline=True)
        self._built: BuiltEngine | None = build_engine(
            model, config, self._run, on_submit=self._shapes.note, capture_ahead=True
        )
        try:
            self.read_bytes_per_s = self.timeline.measure_read_bandwidth()
        except BaseException:
            self.close()
            raise

    @property
    def built(self) -> BuiltEngine:
        """The engine and its parts."""
        assert self._built is not None, "used after its end"
        return self._built

    @property
    def timeline(self) -> TimelineRecorder:
        """What records the engine's steps."""
        timeline = self.built.engine.timeline
        assert timeline is not None, "every measured engine has one"
        return timeline

    def least_bytes(self, workload: Workload) -> int:
        """What any engine must read to run the workload with as many rows as this one has, in bytes."""
        limits = self.timeline.recording().limits
        return least_bytes(workload, limits, max_rows=self.config.max_rows)

    def warm_up(self, workload: Workload) -> None:
        """Run until the kernels are compiled that the workload can meet; every graph is captured already."""
        on_cuda = self.built.loaded.model.device.type == "cuda"
        # A CPU compiles nothing for the shapes of a workload, so a part of its prompts is enough.
        self._play((workload if on_cuda else workload.first(_WARM_UP_REQUESTS)).shortened(_WARM_UP_TOKENS))

    def run(self, workload: Workload, *, repeat: int, progress: Callable[[float], None] | None = None) -> RunFigures:
        """Run a workload and measure it.

        Args:
            workload: what to run.
            repeat: the number of the run.
            progress: told now and then which share of the tokens is there, 0 to 1; without it the caller's thread
                sleeps until the end.

        Raises:
            RequestFailedError, EngineDeadError: it did not come to its end.
        """
        self._shapes.restart()
        before = self.built.engine.counters()
        self._first_step = before.steps
        idle_before = self.timeline.totals().idle
        with _collector_has_little_to_do():
            ids = self._play(workload, progress)
        after = self.built.engine.counters()
        run = self._run
        metrics = [run.ends[request_id].metrics for request_id in ids]
        began_s = min(each.arrived_s for each in metrics)
        ended_s = max(each.finished_s or 0.0 for each in metrics)
        device = after.device.since(before.device)
        return RunFigures(
            depth=self.config.depth,
            repeat=repeat,
            workload=workload.name,
            seconds=ended_s - began_s,
            num_steps=after.steps - before.steps,
            busy_s=device.busy_s,
            window_s=device.window_s,
            preemptions=after.preemptions - before.preemptions,
            steps_digest=self._shapes.digest,
            requests=tuple(map(run.request_figures, ids, workload.requests)),
            token_ids=tuple(map(run.token_ids, ids)),
            steps=step_figures(self.timeline, first_step=before.steps, idle_before=idle_before),
            start_s=self.built.start_s,
        )

    def last_run(self) -> Recording:
        """The steps of the latest run, as far as the recorder still holds them."""
        return self.timeline.recording(first_step=self._first_step)

    def counters(self) -> EngineCounters:
        """The engine's counts."""
        return self.built.engine.counters()

    def close(self) -> None:
        """End the engine and give its memory back to the device, for the next one."""
        built, self._built = self._built, None
        if built is None:
            return
        built.engine.shutdown()
        del built
        give_memory_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _play(self, workload: Workload, progress: Callable[[float], None] | None = None) -> list[int]:
        """Run requests to their ends; returns their ids in order."""
        engine, run = self.built.engine, self._run
        run.begin(len(workload.requests))
        total = sum(request.params.max_tokens or 0 for request in workload.requests)
        before = engine.counters().output_tokens
        ids = engine.submit(workload.requests, lambda ids: None)
        try:
            while not run.done.wait(None if progress is None else _POLL_S):
                assert progress is not None
                progress((engine.counters().output_tokens - before) / total)
        except BaseException:
            engine.abort(ids)  # Ctrl-C: the engine is to stop computing for nobody
            raise
        run.check()
        return ids
