"""Both implementations that run on a CPU mean the same by streams and events: the semantics of CUDA."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.pipeline.streams.cpu import CpuQueues, Delays
from gapless.pipeline.streams.protocol import Event, Queues
from gapless.pipeline.streams.simulator import SimulatorQueues

_MAKERS: dict[str, Callable[[int], Queues]] = {
    "threads": lambda seed: CpuQueues(),
    "delayed-threads": lambda seed: CpuQueues(Delays(fixed_s={}, random_s=0.001, seed=seed)),
    "simulator": SimulatorQueues,
}
# (what, stream or event, event)
_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("record"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("synchronize"), st.integers(0, 2), st.just(0)),
    ),
    max_size=30,
)


@pytest.fixture(params=_MAKERS)
def make_queues(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Queues]]:
    made: list[Queues] = []

    def make(seed: int) -> Queues:
        made.append(_MAKERS[request.param](seed))
        return made[-1]

    yield make
    for queues in made:
        queues.close()


@pytest.mark.parametrize("maker", _MAKERS.values(), ids=_MAKERS)
def test_every_program_runs_in_an_order_that_its_events_allow(maker: Callable[[int], Queues]) -> None:
    @settings(derandomize=True, max_examples=40, deadline=None)
    @given(_OPS, st.integers(0, 10**6))
    def check(ops: list[tuple[str, int, int]], seed: int) -> None:
        queues = maker(seed)
        try:
            _run_program(queues, ops)
        finally:
            queues.close()

    check()


def _run_program(queues: Queues, ops: list[tuple[str, int, int]]) -> None:
    """Run ``ops`` beside the plain rules: what must have happened before each piece of work."""
    streams = [queues.stream(name) for name in ("h2d", "compute", "d2h")]
    events: list[Event] = [queues.event() for _ in range(3)]
    log: list[int] = []
    before: list[set[int]] = [set() for _ in streams]
    recorded: dict[int, set[int]] = {}
    required: list[set[int]] = []
    for what, first, second in ops:
        if what == "work":
            number = len(required)
            required.append(set(before[first]))
            before[first].add(number)
            streams[first].submit(lambda number=number: log.append(number))
        elif what == "record":
            streams[first].record(events[second])
            recorded[second] = set(before[first])
        elif what == "wait":
            streams[first].wait(events[second])
            before[first] |= recorded.get(second, set())
        else:
            events[first].synchronize()
            assert recorded.get(first, set()) <= set(log)
    for stream in streams:
        done = queues.event()
        stream.record(done)
        done.synchronize()
    assert sorted(log) == list(range(len(required)))
    for place, number in enumerate(log):
        assert required[number] <= set(log[:place])


def test_an_event_that_was_never_recorded_holds_nobody_up(make_queues: Callable[[int], Queues]) -> None:
    queues = make_queues(0)
    never, done = queues.event(), queues.event()
    log: list[str] = []
    stream = queues.stream("compute")
    never.synchronize()
    stream.wait(never)
    stream.submit(lambda: log.append("ran"))
    stream.record(done)
    done.synchronize()
    assert log == ["ran"]


def test_waiting_means_the_latest_record_at_the_time_of_the_call(make_queues: Callable[[int], Queues]) -> None:
    for seed in range(20):
        queues = make_queues(seed)
        first, second = queues.stream("h2d"), queues.stream("compute")
        event, done = queues.event(), queues.event()
        log: list[str] = []
        first.submit(lambda log=log: log.append("early"))
        first.record(event)
        second.wait(event)
        # If the wait meant this later record, which waits for the second stream, nobody could go on.
        second.submit(lambda log=log: log.append("second"))
        second.record(done)
        first.wait(done)
        first.submit(lambda log=log: log.append("late"))
        first.record(event)
        done.synchronize()
        assert log[:2] == ["early", "second"]
        event.synchronize()
        assert log == ["early", "second", "late"]


def test_copies_move_bytes_and_work_runs_without_gradients(make_queues: Callable[[int], Queues]) -> None:
    queues = make_queues(3)
    stream = queues.stream("h2d")
    source = queues.host_buffer(1000)
    source.copy_(torch.arange(1000) % 251)
    target = torch.zeros(1000, dtype=torch.uint8)
    inference: list[bool] = []
    done = queues.event()
    stream.copy(target[:500], source[:500])
    stream.submit(lambda: inference.append(torch.is_inference_mode_enabled()))
    stream.record(done)
    done.synchronize()
    assert torch.equal(target[:500], source[:500])
    assert not target[500:].any()
    assert inference == [True]


def test_the_host_goes_on_while_a_stream_waits() -> None:
    queues = CpuQueues()
    gate = threading.Event()
    stream, done = queues.stream("compute"), queues.event()
    stream.submit(lambda: gate.wait(10) or None)
    stream.record(done)
    gate.set()
    done.synchronize()
    queues.close()
