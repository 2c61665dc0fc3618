"""One simulated run: the real engine, scheduler, ring, device step and sampler over a workload (:func:`run`).

Only two things are not the real ones: the queues, whose every order of work is a function of the seed, and the model,
a hash of the KV cache. The engine has no thread; the run drives its loop turn by turn, gives requests and aborts at the
turns of the workload, audits every step, and compares what comes out with what each request gives alone.

A run is a function of its seed. A failure raises :class:`SimulationFailure`, which says how to replay it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from numpy.typing import NDArray

from gapless.engine.engine import Engine
from gapless.engine.request import Request, RequestState
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError
from gapless.outputs import FinishReason
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.ring import CollectedStep, Ring
from gapless.pipeline.step_buffers import BufferLimits
from gapless.pipeline.streams.protocol import Queues
from gapless.pipeline.streams.simulator import SimulatorQueues
from simulation.audit import Audit, AuditedScheduler, Truth, check
from simulation.audited_queues import AuditedQueues, AuditedSampler
from simulation.hash_model import HashModel
from simulation.workload import PlannedAbort, PlannedRequest, Workload, draw_workload

__all__ = ["Rig", "RunSummary", "SimulationFailure", "Sink", "run", "run_workload"]

_MOST_TURNS = 5000


class SimulationFailure(Exception):
    """A run that went wrong; the cause is chained."""

    def __init__(self, seed: int, cause: BaseException) -> None:
        super().__init__(
            f"seed {seed}: {type(cause).__name__}: {cause}\n"
            f"replay: PYTHONPATH=src:tests python -m simulation --start {seed} --seeds 1"
        )
        self.seed = seed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What a run came across; a harness that never preempts would test little."""

    turns: int
    steps: int
    preemptions: int
    cached_tokens: int
    aborted: int
    stopped: int
    failed: int
    dropped_rows: int


class Sink:
    """Takes the engine's news and checks their shape."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.ends: dict[int, RequestUpdate] = {}
        self.error: EngineDeadError | None = None

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Take the news of one step."""
        for update in updates:
            check(update.request_id not in self.ends, f"news of request {update.request_id} after its end")
            self.ids.setdefault(update.request_id, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[update.request_id] = update

    def engine_died(self, error: EngineDeadError) -> None:
        """Remember why."""
        self.error = error


class AuditedRing(Ring):
    """A ring that checks that a result never changes after it was handed out."""

    _results: deque[tuple[NDArray[object], NDArray[object]]]

    def collect(self) -> CollectedStep:
        """Collect, and compare earlier results with what they were."""
        step = super().collect()
        self._check_results()
        for array in (step.result.tokens, step.result.healthy):
            self._results.append((array, array.copy()))
        return step

    def watch(self, count: int) -> None:
        """Remember the latest ``count`` results."""
        self._results = deque(maxlen=2 * count)

    def _check_results(self) -> None:
        for array, before in self._results:
            check(bool((array == before).all()), "a result changed after it was collected")


class Rig:
    """An engine over ``queues`` and a hash model, with the audit in place."""

    def __init__(self, workload: Workload, queues: Queues) -> None:
        limits = workload.scheduler
        size = limits.block_size
        self.workload = workload
        self._commanded = False
        self.audit = Audit()
        self.sink = Sink()
        self.queues = AuditedQueues(queues)
        self.scheduler = AuditedScheduler(limits, workload.num_blocks, self.audit)
        self.model = HashModel(
            num_blocks=workload.num_blocks, block_size=size, seed=workload.seed, poison=workload.poison
        )
        self.device_step = DeviceStep(
            model=self.model,
            sampler=AuditedSampler(max_rows=limits.max_rows, queues=self.queues),
            max_rows=limits.max_rows,
            max_blocks_per_row=workload.num_blocks,
            block_size=size,
            device=torch.device("cpu"),
        )
        self.queues.watch([self.device_step.block_tables, self.device_step.last_tokens])
        widest = max((limits.max_rows, *limits.buckets))
        self.ring = AuditedRing(
            queues=self.queues,
            depth=workload.depth,
            limits=BufferLimits(
                max_tokens=max(limits.token_budget, widest),
                max_rows=widest,
                max_changes=limits.max_changes,
                max_masked=8 * widest,
            ),
            device_step=self.device_step,
        )
        self.ring.watch(workload.depth + 1)
        self.engine = Engine(
            scheduler=self.scheduler,
            ring=self.ring,
            sink=self.sink,
            limits=workload.admission,
            step_timeout_s=60.0,
            on_close=self.queues.close,
        )

    def submit(self, planned: PlannedRequest) -> int:
        """Queue a request; the audit learns what it must give."""

        def told(ids: list[int]) -> None:
            self.audit.truth[ids[0]] = Truth.of(planned.source.prompt_token_ids, planned.expected)

        self._commanded = True
        return self.engine.submit([planned.source], told)[0]

    def abort(self, request_id: int) -> None:
        """Ask for a request's end."""
        self._commanded = True
        self.engine.abort([request_id])

    def turn(self) -> None:
        """One turn of the loop, with its checks."""
        before = self.engine.counters().steps, self.ring.num_in_flight, len(self.scheduler.waiting)
        commanded, self._commanded = self._commanded, False
        check(self.engine.run_once(), "the loop ended")
        self.audit.check_pool(self.scheduler)
        counters = self.engine.counters()
        total = counters.free_blocks + counters.cached_blocks + counters.used_blocks
        check(total == self.workload.num_blocks, f"{counters} do not add up to {self.workload.num_blocks} blocks")
        after = counters.steps, self.ring.num_in_flight, len(self.scheduler.waiting)
        check(before != after or commanded, "no progress: work is left, and a turn of the loop did nothing")

    def check_idle(self) -> None:
        """Nothing is left behind."""
        counters = self.engine.counters()
        check(counters.in_flight_tokens == 0, f"{counters.in_flight_tokens} tokens are in flight")
        check(counters.used_blocks == 0, f"{counters.used_blocks} blocks are in use")
        check(counters.running == counters.waiting == 0, f"{counters} are not those of an idle engine")
        self.queues.check_inputs()
        for (row, column), block in self.audit.tables.items():
            check(int(self.device_step.block_tables[row, column]) == block, "the device's table differs")


def run(seed: int) -> RunSummary:
    """Run a seed on simulated queues.

    Raises:
        SimulationFailure: anything went wrong.
    """
    try:
        return run_workload(draw_workload(seed), SimulatorQueues(seed))
    except Exception as error:
        raise SimulationFailure(seed, error) from error


def run_workload(workload: Workload, queues: Queues) -> RunSummary:
    """Run a workload on any queues, and check everything."""
    rig = Rig(workload, queues)
    try:
        run = _Run(rig)
        run.main()
        run.check_outputs()
        last = rig.submit(workload.last)
        run.until_idle()
        _check_output(workload.last, rig.sink.ids[last], rig.sink.ends[last])
        rig.check_idle()
        return run.summary()
    finally:
        queues.close()


class _Run:
    """The course of a run: arrivals and aborts by turn."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self._turn = 0
        self._arrivals = deque(rig.workload.requests)
        self._aborts = list(rig.workload.aborts)
        self._ids: list[int] = []

    def main(self) -> None:
        engine = self.rig.engine
        while self._arrivals or engine.has_work:
            while self._arrivals and self._arrivals[0].arrival <= self._turn:
                self._ids.append(self.rig.submit(self._arrivals.popleft()))
            for abort in [abort for abort in self._aborts if self._is_due(abort)]:
                self._aborts.remove(abort)
                known = abort.index < len(self._ids)
                self.rig.abort(self._ids[abort.index] if known else 10**6 + abort.index)
            if engine.has_work:
                self.rig.turn()
            self._turn += 1
            check(self._turn < _MOST_TURNS, f"not done after {_MOST_TURNS} turns")
        self.rig.check_idle()

    def until_idle(self) -> None:
        while self.rig.engine.has_work:
            self.rig.turn()
            self._turn += 1

    def check_outputs(self) -> None:
        sink, depth = self.rig.sink, self.rig.workload.depth
        check(set(self._ids) == set(sink.ends), "a request has no end")
        for request_id, planned in zip(self._ids, self.rig.workload.requests, strict=True):
            end = sink.ends[request_id]
            _check_output(planned, sink.ids[request_id], end)
            samples = self.rig.audit.num_samples[request_id]
            extra = samples - len(sink.ids[request_id]) - (end.finish_reason == "error")
            most = 0 if end.finish_reason == "length" else depth - 1
            check(0 <= extra <= most, f"request {request_id} took part in {samples} sampling steps: {end}")

    def summary(self) -> RunSummary:
        counters = self.rig.engine.counters()
        ends = self.rig.sink.ends.values()
        reasons: list[FinishReason | None] = [end.finish_reason for end in ends]
        return RunSummary(
            turns=self._turn,
            steps=counters.steps,
            preemptions=counters.preemptions,
            cached_tokens=sum(end.num_cached_tokens for end in ends),
            aborted=reasons.count("abort"),
            stopped=reasons.count("stop"),
            failed=reasons.count("error"),
            dropped_rows=self.rig.audit.num_samples.total() - counters.output_tokens,
        )

    def _is_due(self, abort: PlannedAbort) -> bool:
        if abort.moment == "anytime" or abort.index >= len(self._ids):
            return self._turn >= abort.turn
        request = self.rig.audit.requests.get(self._ids[abort.index])
        return request is not None and _MOMENTS[abort.moment](request)


def _was_preempted(request: Request) -> bool:
    return request.state is RequestState.WAITING and request.metrics.num_preemptions > 0


_MOMENTS: dict[str, Callable[[Request], bool]] = {
    "waiting": lambda request: request.state is RequestState.WAITING,
    "running": lambda request: request.state is RequestState.RUNNING,
    "retiring": lambda request: request.state is RequestState.RETIRING,
    "preempted": _was_preempted,
}


def _check_output(planned: PlannedRequest, ids: list[int], end: RequestUpdate) -> None:
    expected = planned.expected
    if end.finish_reason == "abort":
        right = tuple(ids) == expected.token_ids[: len(ids)]
    else:
        right = tuple(ids) == expected.token_ids and (end.finish_reason, end.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )
    check(right, f"request {end.request_id} gave {ids} and {end.finish_reason}; alone it gives {expected}")
