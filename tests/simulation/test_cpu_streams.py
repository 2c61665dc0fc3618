"""The same harness on worker threads: real hazards, with delays that force and shuffle the order of events."""

import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gapless.errors import EngineDeadError, StepTimeoutError
from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.device_step import ForwardModel
from gapless.pipeline.streams.cpu import CpuQueues, Delays
from simulation.harness import Rig, run_workload
from simulation.setting import PlannedRequest, greedy, make_setting
from simulation.workload import Workload, draw_workload

_MS = 1e-3
_DELAYS = {
    "none": None,
    "slow-h2d": Delays(fixed_s={"h2d": 2 * _MS}),
    "slow-compute": Delays(fixed_s={"compute": 2 * _MS}),
    "slow-d2h": Delays(fixed_s={"d2h": 2 * _MS}),
    "random": Delays(fixed_s={}, random_s=2 * _MS, seed=3),
}


def _workload(seed: int, depth: int) -> Workload:
    workload = draw_workload(seed)
    return replace(workload, setting=replace(workload.setting, depth=depth))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("delays", _DELAYS.values(), ids=_DELAYS)
def test_worker_threads_give_what_each_request_gives_alone(depth: int, delays: Delays | None) -> None:
    for seed in range(100 * depth, 100 * depth + 4):
        run_workload(_workload(seed, depth), CpuQueues(delays))


class _Ends:
    """Waits until requests have ended, or the engine has."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def wait(self, ids: list[int], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not (self._rig.sink.error or set(ids) <= self._rig.sink.ends.keys()):
            assert time.monotonic() < deadline_s, f"of {ids} only {sorted(self._rig.sink.ends)} ended"
            time.sleep(0.002)


def _endless(rig: Rig, first: int) -> PlannedRequest:
    return rig.setting.plan(greedy([first, 2, 3], max_tokens=None))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_started_engine_serves_several_callers(depth: int) -> None:
    rig = Rig(make_setting(depth=depth, num_blocks=12), CpuQueues(_DELAYS["random"]))
    rig.engine.start()
    served: dict[int, PlannedRequest] = {}

    def call(first: int) -> None:
        for length in (1, 5, 9):
            planned = rig.setting.plan(greedy([first, *range(length)], 12, streams=True))
            served[rig.submit(planned)] = planned
            time.sleep(0.003)

    callers = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(10)
    _Ends(rig).wait(list(served), 30)
    rig.engine.shutdown()

    assert rig.sink.error is None
    assert len(served) == 12
    for request_id, planned in served.items():
        rig.check_output(planned, request_id)
    rig.check_idle()


def test_c05_a_started_idle_and_again_after_idling() -> None:
    rig = Rig(make_setting(), CpuQueues())
    rig.engine.start()
    for pause_s in (0.3, 0.3):
        time.sleep(pause_s)
        planned = rig.setting.plan(greedy([1, 2, 3], 5))
        request_id = rig.submit(planned)
        _Ends(rig).wait([request_id], 10)
        rig.check_output(planned, request_id)
    rig.engine.shutdown()


class _Breakable:
    """A model whose forward pass raises once ``broken`` is set."""

    def __init__(self, inner: ForwardModel, broken: threading.Event) -> None:
        self._inner = inner
        self._broken = broken

    def forward(self, inputs: ForwardInputs) -> Tensor:
        if self._broken.is_set():
            raise FloatingPointError("the device caught fire")
        return self._inner.forward(inputs)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c05_b_waiters_and_later_callers_get_the_cause(depth: int) -> None:
    broken = threading.Event()
    queues = CpuQueues(Delays(fixed_s={"compute": 1 * _MS}))
    # Long enough to be still running when the model breaks; rows for some of the five only.
    rig = Rig(make_setting(depth=depth, num_blocks=300), queues, wrap_model=lambda model: _Breakable(model, broken))
    rig.engine.start()
    for first in range(5):
        rig.submit(_endless(rig, first))

    broken.set()
    deadline_s = time.monotonic() + 1
    while rig.sink.error is None:
        assert time.monotonic() < deadline_s, "the sink did not hear that the loop ended"
        time.sleep(0.002)

    assert "FloatingPointError: the device caught fire" in str(rig.sink.error)
    assert isinstance(rig.sink.error.__cause__, FloatingPointError)
    with pytest.raises(EngineDeadError, match="the device caught fire") as caught:
        rig.submit(_endless(rig, 9))
    assert isinstance(caught.value.__cause__, FloatingPointError)
    assert isinstance(rig.engine.error, EngineDeadError)
    rig.engine.abort([0, 1, 77])
    rig.engine.shutdown()


class _Stuck:
    """A model that hangs in its second step until it is released."""

    def __init__(self, inner: ForwardModel) -> None:
        self._inner = inner
        self._calls = 0
        self.release = threading.Event()

    def forward(self, inputs: ForwardInputs) -> Tensor:
        self._calls += 1
        if self._calls == 2:
            self.release.wait(20)
        return self._inner.forward(inputs)


def test_a_step_that_never_comes_back_is_named() -> None:
    stuck: list[_Stuck] = []

    def wrap(model: ForwardModel) -> ForwardModel:
        stuck.append(_Stuck(model))
        return stuck[0]

    rig = Rig(make_setting(depth=2), CpuQueues(), step_timeout_s=0.2, wrap_model=wrap)
    rig.engine.start()
    first = rig.submit(_endless(rig, 1))
    try:
        _Ends(rig).wait([first], 5)

        assert isinstance(rig.sink.error, StepTimeoutError)
        assert f"within 0.2 s: step 1 with 1 tokens for the requests {first}" in str(rig.sink.error)
        with pytest.raises(StepTimeoutError, match="step 1"):
            rig.submit(_endless(rig, 2))
    finally:
        stuck[0].release.set()
    rig.engine.shutdown()


def test_shutdown_ends_what_is_live() -> None:
    rig = Rig(make_setting(depth=3, num_blocks=300), CpuQueues(Delays(fixed_s={"compute": 2 * _MS})))
    rig.engine.start()
    planned = [rig.setting.plan(greedy([first], None, streams=True)) for first in range(6)]
    ids = [rig.submit(each) for each in planned]
    while not rig.sink.ids:
        time.sleep(0.001)
    rig.engine.shutdown()

    assert rig.sink.error is None
    for request_id, each in zip(ids, planned, strict=True):
        assert rig.sink.ends[request_id].finish_reason == "abort"
        rig.check_output(each, request_id)
    with pytest.raises(EngineDeadError, match="shut down"):
        rig.submit(planned[0])
    rig.check_idle()


def test_an_idle_engine_keeps_no_request_and_no_batch_alive() -> None:
    rig = Rig(make_setting(), CpuQueues())
    rig.engine.start()
    planned = rig.setting.plan(greedy([1, 2, 3], 5))
    request_id = rig.submit(planned)
    _Ends(rig).wait([request_id], 10)
    request = rig.audit.requests.pop(request_id)
    prompt = weakref.ref(request.prompt)
    del request
    # The loop's own last references go when it turns to sleep.
    deadline_s = time.monotonic() + 2
    while prompt() is not None and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert prompt() is None
    rig.engine.shutdown()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> object:
    torch.set_num_threads(1)
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not left, f"threads are left: {left}"
