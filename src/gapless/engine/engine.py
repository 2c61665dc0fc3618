"""The engine: one thread, one loop, which keeps the ring full and never waits for anything but the oldest step.

::

    loop:
        take commands (add, abort)                     # never blocks while steps are in flight
        if the ring has room and the scheduler has work:  submit(schedule())
        if the ring is full, or nothing was scheduled:    apply(collect())       # the only wait for the device
        nothing in flight and nothing to do:              sleep until a command comes

The same loop serves every depth. Callers talk to it by commands, which are applied at a step boundary, and hear from
it through an :class:`OutputSink`. If the loop dies, every waiting and every later caller gets the cause.
"""

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from gapless.engine.admission import AdmissionLimits
from gapless.engine.request import EngineRequest, Request, choice_seed
from gapless.engine.results import RequestUpdate, ResultApplier
from gapless.engine.scheduler import Scheduler
from gapless.engine.stop_check import StopCheck
from gapless.engine.watchdog import Watchdog
from gapless.errors import EngineDeadError, QueueFullError, StepTimeoutError
from gapless.pipeline.batch import Int32Array, ScheduledBatch
from gapless.pipeline.ring import Ring
from gapless.timeline.activity import ActivitySnapshot, DeviceActivity
from gapless.timeline.recorder import TimelineRecorder
from gapless.timeline.step_recorder import NO_TIMELINE

__all__ = ["Engine", "EngineCounters", "OutputSink"]

_log = logging.getLogger("gapless")


class OutputSink(Protocol):
    """Where the engine's news go. Called in the engine's thread; must not block."""

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Take the news of one step."""

    def engine_died(self, error: EngineDeadError) -> None:
        """No more news will come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounters:
    """A moment's counts. ``free + cached + used`` blocks are all there are; ``cached`` ones can be evicted."""

    free_blocks: int
    cached_blocks: int
    used_blocks: int
    running: int
    waiting: int
    in_flight_tokens: int
    steps: int
    output_tokens: int
    preemptions: int
    aborted: int
    device: ActivitySnapshot


class Engine:
    """Runs requests on a ring.

    Args:
        scheduler: the rules and the state of requests.
        ring: the pipeline; the engine's thread is the only one that uses it.
        sink: hears of tokens and ends.
        limits: what can be admitted.
        step_timeout_s: a step that takes longer fails the engine.
        on_close: called in the engine's thread when the loop has ended.
        on_submit: shown every batch right before it is enqueued.
        timeline: hears of every step, the same as the ring's; ``None`` where nobody wants one.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        ring: Ring,
        sink: OutputSink,
        limits: AdmissionLimits,
        step_timeout_s: float,
        on_close: Callable[[], None] = lambda: None,
        on_submit: Callable[[ScheduledBatch], None] = lambda batch: None,
        timeline: TimelineRecorder | None = None,
    ) -> None:
        self.limits = limits
        self.timeline = timeline
        self._recorder = timeline or NO_TIMELINE
        self._scheduler = scheduler
        self._ring = ring
        self._sink = sink
        self._on_close = on_close
        self._on_submit = on_submit
        self._applier = ResultApplier(scheduler)
        self._activity = DeviceActivity()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._ids = itertools.count()
        self._num_commanded = 0  # requests in `_commands`, which the scheduler has not seen yet
        self._stopping = False
        self._error: EngineDeadError | None = None
        self._watchdog = Watchdog(step_timeout_s, self._step_is_late)
        self._thread = threading.Thread(target=self._run, name="gapless-engine", daemon=True)

    # --- for callers, from any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def submit(self, requests: Sequence[EngineRequest], on_ids: Callable[[list[int]], None]) -> list[int]:
        """Queue requests together, so that what steps hold does not depend on the clock.

        Args:
            requests: checked one by one first; if one is refused nothing is queued.
            on_ids: told the new ids before any news of them can be published: one for each choice, those of a request
                side by side.

        Raises:
            RequestError: a request cannot be served, or the queue is full.
            EngineDeadError: the loop has ended.
        """
        checked = [_Checked.by(self.limits, request) for request in requests]
        num_choices = sum(request.params.n for request in requests)
        now_s = time.perf_counter()
        with self._wake:
            self.check_alive()
            if (queued := self._num_waiting + num_choices) > self.limits.max_waiting:
                raise QueueFullError(
                    f"{num_choices} more requests would make {queued} queued; at most "
                    f"max_waiting={self.limits.max_waiting} may wait: try again later"
                )
            groups = [self._choices(each, now_s) for each in checked]
            self._num_commanded += num_choices
            ids = [choice.id for choices in groups for choice in choices]
            on_ids(ids)
            self._commands.append(lambda: self._add(groups))
            self._wake.notify()
        return ids

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests at the next step boundary; ended or unknown ids are nothing."""
        ids = list(request_ids)
        with self._wake:
            self._commands.append(lambda: self._abort(ids))
            self._wake.notify()

    def counters(self) -> EngineCounters:
        """Counts at this moment (each is right; together they may straddle a step)."""
        pool, scheduler = self._scheduler.pool, self._scheduler
        live = list(self._applier.live.values())
        return EngineCounters(
            free_blocks=pool.num_free,
            cached_blocks=pool.num_evictable,
            used_blocks=pool.num_in_use,
            running=len(scheduler.running),
            waiting=self._num_waiting,
            in_flight_tokens=sum(request.in_flight for request in live),
            steps=scheduler.num_steps,
            output_tokens=self._applier.num_output_tokens
            + sum(len(request.output) - request.num_published for request in live),
            preemptions=scheduler.num_preemptions,
            aborted=self._applier.num_aborted,
            device=self._activity.snapshot(),
        )

    @property
    def error(self) -> EngineDeadError | None:
        """What ended the loop, if an error did."""
        return self._error

    def check_alive(self) -> None:
        """Raise :class:`EngineDeadError`, a fresh one for each caller with its cause chained, if the loop has ended."""
        if self._error is not None:
            raise type(self._error)(str(self._error)) from (self._error.__cause__ or self._error)
        if self._stopping:
            raise EngineDeadError("the engine was shut down")

    def shutdown(self, timeout_s: float = 30.0) -> None:
        """End the loop; requests still live are aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is None:
            self._run()  # it was never started, and whoever drove it by `run_once` ends it here
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def _num_waiting(self) -> int:
        return self._num_commanded + self._scheduler.num_waiting

    def _choices(self, checked: "_Checked", arrived_s: float) -> list[Request]:
        return [
            Request(
                next(self._ids),
                checked.source,
                prompt=checked.prompt,
                max_tokens=checked.max_tokens,
                seed=choice_seed(checked.source.params.seed, index),
                stop_check=stop_check,
                arrived_s=arrived_s,
            )
            for index, stop_check in enumerate(checked.stop_checks)
        ]

    # --- the loop, in the engine's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self.run_once():
                pass
            self._drain()
        except BaseException as error:
            self._die(EngineDeadError(f"the engine loop ended: {type(error).__name__}: {error}"), error)
        finally:
            self._watchdog.close()
            self._on_close()

    @property
    def has_work(self) -> bool:
        """Whether the next turn of the loop finds anything to do without sleeping."""
        return bool(self._commands or self._ring.num_in_flight or self._scheduler.has_work)

    def run_once(self) -> bool:
        """One turn of the loop; sleeps first if there is nothing to do. False when the loop has to end.

        Public for those who drive an engine that was not started: the simulator and the host benchmark.
        """
        if not self._take_commands():
            return False
        batch = None
        if self._ring.has_room and self._scheduler.has_work:
            self._recorder.scheduling()
            batch = self._scheduler.schedule()
            if batch is not None:
                self._on_submit(batch)
                self._activity.submitted()
                self._ring.submit(batch)
        if self._ring.num_in_flight and (batch is None or not self._ring.has_room):
            self._collect()
        else:
            # With nothing in flight every block and row is free or held by a running request, so something fits.
            assert batch is not None or not self._scheduler.waiting, "work waits, nothing runs, nothing is in flight"
        self._publish()
        return True

    def _collect(self) -> None:
        with self._watchdog.watching():
            step = self._ring.collect()
        self._activity.collected(step.result.busy_s)
        self._applier.apply(step, time.perf_counter())
        self._recorder.applied()

    def _take_commands(self) -> bool:
        """Run what callers asked for; sleep first if there is nothing else to do. False to stop."""
        with self._wake:
            while not (self._stopping or self.has_work):
                self._activity.slept()
                self._recorder.slept()
                self._wake.wait()
                self._recorder.woke()
            commands, self._commands = self._commands, deque()
            stopping = self._stopping
        for command in commands:
            command()
        return not stopping and self._error is None

    def _add(self, groups: list[list[Request]]) -> None:
        for choices in groups:
            self._applier.live.update((choice.id, choice) for choice in choices)
            self._scheduler.add(*choices)
        with self._wake:
            self._num_commanded -= sum(map(len, groups))

    def _abort(self, request_ids: list[int]) -> None:
        for request_id in request_ids:
            self._applier.abort(request_id, time.perf_counter())
        self._publish()

    def _drain(self) -> None:
        while self._ring.num_in_flight:
            self._collect()
        self._abort(list(self._applier.live))
        with self._wake:
            self._error = self._error or EngineDeadError("the engine was shut down")

    def _publish(self) -> None:
        updates = self._applier.take_updates()
        if updates:
            self._sink.publish(updates)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _step_is_late(self, waited_s: float) -> None:
        """The watchdog's verdict, in its thread: the loop hangs in a device wait that may never end."""
        batch = self._ring.oldest
        what = _describe(batch) if batch else "an unknown step"
        self._die(StepTimeoutError(f"a step did not come back within {waited_s:g} s: {what}"), None)

    def _die(self, error: EngineDeadError, cause: BaseException | None) -> None:
        error.__cause__ = cause
        with self._wake:
            if self._error is not None:
                return
            self._error = error
            self._commands.clear()
        _log.error("%s", error)
        self._sink.engine_died(error)


class _Checked(NamedTuple):
    """A request that can be served, and what takes long to make: not under the lock that the loop needs."""

    source: EngineRequest
    max_tokens: int
    prompt: Int32Array
    stop_checks: list[StopCheck | None]

    @classmethod
    def by(cls, limits: AdmissionLimits, source: EngineRequest) -> "_Checked":
        max_tokens = limits.check(source)
        make = source.make_stop_check
        return cls(
            source,
            max_tokens,
            np.asarray(source.prompt_token_ids, dtype=np.int32),
            [None if make is None else make() for _ in range(source.params.n)],
        )


def _describe(batch: ScheduledBatch) -> str:
    requests = ", ".join(str(entry.request_id) for entry in batch.entries[:8])
    more = "" if len(batch.entries) <= 8 else f" and {len(batch.entries) - 8} more"
    num_tokens = sum(entry.num_tokens for entry in batch.entries)
    return f"step {batch.step} with {num_tokens} tokens for the requests {requests}{more}"
