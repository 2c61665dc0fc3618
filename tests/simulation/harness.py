"""One simulated run: the real engine, scheduler, ring, device step and sampler over a workload (:func:`run`).

Only two things are not the real ones: the queues, whose every order of work is a function of the seed, and the model,
a hash of the KV cache. The engine has no thread; the run drives its loop turn by turn, gives requests and aborts at the
turns of the workload, audits every step, and compares what comes out with what each request gives alone.

A run is a function of its seed. A failure raises :class:`SimulationError`, which says how to replay it.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from numpy.typing import NDArray

from gapless.engine.engine import Engine
from gapless.engine.logprobs import TokenLogprobs
from gapless.engine.request import Request, RequestState
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError
from gapless.outputs import FinishReason
from gapless.pipeline.device_step import DeviceStep, ForwardModel, StepExecutor
from gapless.pipeline.graphs import GraphedStep
from gapless.pipeline.ring import CollectedStep, Ring
from gapless.pipeline.step_buffers import BufferLimits
from gapless.pipeline.streams.protocol import Queues
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling.wide_state import WideState
from simulation.audit import Audit, AuditedScheduler, Truth, check
from simulation.audited_queues import AuditedQueues, AuditedSampler
from simulation.hash_model import VOCAB_SIZE, HashModel
from simulation.judge import JudgeMaker, judged_text
from simulation.rating import check_logprobs
from simulation.recordings import ClosureRecorder
from simulation.setting import PlannedRequest, Setting
from simulation.workload import PlannedAbort, Workload, draw_workload

__all__ = ["Rig", "RunSummary", "SimulationError", "Sink", "run", "run_workload"]

_MOST_TURNS = 5000


class SimulationError(Exception):
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
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.ends: dict[int, RequestUpdate] = {}
        self.error: EngineDeadError | None = None

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Take the news of one step."""
        for update in updates:
            check(update.request_id not in self.ends, f"news of request {update.request_id} after its end")
            self.ids.setdefault(update.request_id, []).extend(update.token_ids)
            self.logprobs.setdefault(update.request_id, []).extend(update.logprobs or ())
            if update.text is not None:
                self.texts[update.request_id] = self.texts.get(update.request_id, "") + update.text
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

    def __init__(
        self,
        setting: Setting,
        queues: Queues,
        *,
        step_timeout_s: float = 60.0,
        wrap_model: Callable[[ForwardModel], ForwardModel] = lambda model: model,
    ) -> None:
        limits = setting.scheduler
        size = limits.block_size
        self.setting = setting
        self._commanded = False
        self._choice_ids: dict[int, list[int]] = {}
        self.audit = Audit()
        self.sink = Sink()
        self.queues = AuditedQueues(queues)
        self.scheduler = AuditedScheduler(limits, setting.num_blocks, self.audit)
        self.model = HashModel(num_blocks=setting.num_blocks, block_size=size, seed=setting.seed, poison=setting.poison)
        wide = WideState(num_rows=limits.wide.max_rows, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
        self.device_step = DeviceStep(
            model=wrap_model(self.model),
            sampler=AuditedSampler(max_rows=limits.max_rows, queues=self.queues, wide=wide),
            max_rows=limits.max_rows,
            max_blocks_per_row=setting.num_blocks,
            block_size=size,
            device=torch.device("cpu"),
        )
        self.queues.watch([self.device_step.block_tables, self.device_step.last_tokens])
        self.executor: StepExecutor = self.device_step
        widest = most_tokens = limits.max_rows
        if (buckets := limits.buckets) is not None:
            self.executor = GraphedStep(self.device_step, ClosureRecorder(), buckets)
            widest = max(widest, *buckets.decode, 0)
            most_tokens = max(widest, *buckets.mixed, 0)
        self.ring = AuditedRing(
            queues=self.queues,
            depth=setting.depth,
            limits=BufferLimits(
                max_tokens=max(limits.token_budget, most_tokens),
                max_rows=widest,
                max_changes=limits.max_changes,
                max_masked=8 * widest,
                wide=limits.wide,
                logprobs=limits.logprobs,
            ),
            device_step=self.executor,
        )
        self.ring.watch(setting.depth + 1)
        self.engine = Engine(
            scheduler=self.scheduler,
            ring=self.ring,
            sink=self.sink,
            limits=setting.admission,
            step_timeout_s=step_timeout_s,
            on_close=self.queues.close,
        )
        # With the rig its engine ends, and with that the queues and the watchdog's thread.
        weakref.finalize(self, self.engine.shutdown).atexit = False

    def submit(self, planned: PlannedRequest) -> int:
        """Queue a request; the audit learns what it must give. Returns the id of its first choice."""

        def told(ids: list[int]) -> None:
            self._choice_ids[ids[0]] = ids
            for choice_id, expected in zip(ids, planned.choices, strict=True):
                self.audit.truth[choice_id] = Truth.of(planned.source.prompt_token_ids, expected)

        self._commanded = True
        return self.engine.submit([planned.source], told)[0]

    def choice_ids(self, request_id: int) -> list[int]:
        """The ids of a request's choices, given the first; an unknown id is that of a request of its own."""
        return self._choice_ids.get(request_id, [request_id])

    def abort(self, request_id: int, *, first_only: bool = False) -> None:
        """Ask for a request's end, with all its choices or the first one only."""
        self._commanded = True
        self.engine.abort([request_id] if first_only else self.choice_ids(request_id))

    def turn(self) -> None:
        """One turn of the loop, with its checks."""
        before = self.scheduler.num_steps, self.ring.num_in_flight, len(self.scheduler.waiting)
        commanded, self._commanded = self._commanded, False
        check(self.engine.run_once(), "the loop ended")
        self.audit.check_pool(self.scheduler)
        counters = self.engine.counters()
        total = counters.free_blocks + counters.cached_blocks + counters.used_blocks
        check(total == self.setting.num_blocks, f"{counters} do not add up to {self.setting.num_blocks} blocks")
        after = self.scheduler.num_steps, self.ring.num_in_flight, len(self.scheduler.waiting)
        check(before != after or commanded, "no progress: work is left, and a turn of the loop did nothing")

    def run_until_idle(self) -> None:
        """Turn until nothing is left to do, and check that nothing is left behind."""
        while self.engine.has_work:
            self.turn()
        self.check_idle()

    def check_output(self, planned: PlannedRequest, request_id: int) -> None:
        """What a request's choices gave is what each gives alone, or the start of it if it was aborted."""
        for choice_id, expected in zip(self.choice_ids(request_id), planned.choices, strict=True):
            ids, end = tuple(self.sink.ids[choice_id]), self.sink.ends[choice_id]
            text = self.sink.texts.get(choice_id)
            if end.finish_reason == "abort":
                maker = planned.source.make_stop_check
                right_text = judged_text(ids, maker) if isinstance(maker, JudgeMaker) else ""
                right = ids == expected.token_ids[: len(ids)] and (text or "") == right_text
            else:
                given = ids, end.finish_reason, end.stop_reason, text
                right = given == (expected.token_ids, expected.finish_reason, expected.stop_reason, expected.text)
            check(right, f"request {choice_id} gave {ids}, {end} and {text!r}; alone it gives {expected}")
            source, params = planned.source, planned.source.params
            if choice_id != request_id:
                params = replace(params, prompt_logprobs=None)  # the first choice has them for all
            logprobs = self.sink.logprobs[choice_id]
            check_logprobs(source.prompt_token_ids, params, ids, logprobs, end, poison=self.setting.poison)

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
        SimulationError: anything went wrong.
    """
    try:
        return run_workload(draw_workload(seed), SimulatorQueues(seed))
    except Exception as error:
        raise SimulationError(seed, error) from error


def run_workload(workload: Workload, queues: Queues) -> RunSummary:
    """Run a workload on any queues, and check everything."""
    rig = Rig(workload.setting, queues)
    run = _Run(rig, workload)
    run.main()
    run.check_outputs()
    last = rig.submit(workload.last)
    rig.run_until_idle()
    rig.check_output(workload.last, last)
    return run.summary()


class _Run:
    """The course of a run: arrivals and aborts by turn."""

    def __init__(self, rig: Rig, workload: Workload) -> None:
        self.rig = rig
        self._requests = workload.requests
        self._turn = 0
        self._arrivals = deque(workload.requests)
        self._aborts = list(workload.aborts)
        self._ids: list[int] = []

    def main(self) -> None:
        engine = self.rig.engine
        while self._arrivals or engine.has_work:
            while self._arrivals and self._arrivals[0].arrival <= self._turn:
                self._ids.append(self.rig.submit(self._arrivals.popleft()))
            for abort in [abort for abort in self._aborts if self._is_due(abort)]:
                self._aborts.remove(abort)
                known = abort.index < len(self._ids)
                hit = self._ids[abort.index] if known else 10**6 + abort.index
                self.rig.abort(hit, first_only=abort.first_only)
            if engine.has_work:
                self.rig.turn()
            self._turn += 1
            check(self._turn < _MOST_TURNS, f"not done after {_MOST_TURNS} turns")
        self.rig.check_idle()

    def check_outputs(self) -> None:
        sink, depth = self.rig.sink, self.rig.setting.depth
        check({i for first in self._ids for i in self.rig.choice_ids(first)} == set(sink.ends), "a request has no end")
        for request_id, planned in zip(self._ids, self._requests, strict=True):
            self.rig.check_output(planned, request_id)
            maker = planned.source.make_stop_check
            late = maker.late if isinstance(maker, JudgeMaker) else 0
            for choice_id in self.rig.choice_ids(request_id):
                end = sink.ends[choice_id]
                samples = self.rig.audit.num_samples[choice_id]
                extra = samples - len(sink.ids[choice_id]) - (end.finish_reason == "error")
                most = 0 if end.finish_reason == "length" else depth - 1 + late
                check(0 <= extra <= most, f"request {choice_id} took part in {samples} sampling steps: {end}")

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
