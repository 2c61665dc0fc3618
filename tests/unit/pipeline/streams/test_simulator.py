"""The simulator: an order of work is a function of the seed, and the seeds reach every legal kind of order."""

from itertools import pairwise

import pytest
import torch

from gapless.pipeline.streams.simulator import SimulatedDeadlockError, SimulatorQueues


def _order(seed: int) -> list[str]:
    """Enqueue work on three streams, and see what had run when the host looked, and in which order."""
    queues = SimulatorQueues(seed)
    log: list[str] = []
    ends = []
    for name in ("h2d", "compute", "d2h"):
        stream = queues.stream(name)
        for number in range(3):
            stream.submit(lambda what=f"{name}-{number}": log.append(what))
        stream.record(end := queues.event())
        ends.append(end)
        log.append(f"host-{name}")
    for end in ends:
        end.synchronize()
    return log


def test_a_seed_is_an_order() -> None:
    orders = [_order(seed) for seed in range(40)]
    assert orders == [_order(seed) for seed in range(40)]
    assert len(set(map(tuple, orders))) > 15


def test_fully_eager_and_fully_lazy_devices_are_among_the_seeds() -> None:
    orders = [_order(seed) for seed in range(60)]
    assert any(order[:3] == ["host-h2d", "host-compute", "host-d2h"] for order in orders), "runs only when waited for"
    eager = [f"{name}-{i}" for name in ("h2d", "compute", "d2h") for i in range(3)]
    assert any([what for what in order if not what.startswith("host")] == eager for order in orders)
    assert any(order[3] == "host-h2d" for order in orders), "runs at once"


def test_work_of_one_stream_keeps_its_order() -> None:
    for seed in range(40):
        for name in ("h2d", "compute", "d2h"):
            own = [what for what in _order(seed) if what.startswith(name)]
            assert own == sorted(own)


def test_copies_can_be_seen_half_done() -> None:
    states = set()
    for seed in range(60):
        queues = SimulatorQueues(seed)
        copy, look = queues.stream("h2d"), queues.stream("compute")
        target, source = torch.zeros(9, dtype=torch.uint8), torch.ones(9, dtype=torch.uint8)
        copy.copy(target, source)
        look.submit(lambda target=target: states.add(int(target.sum())))
        look.record(done := queues.event())
        copy.record(copied := queues.event())
        done.synchronize()
        copied.synchronize()
        assert target.tolist() == [1] * 9
    assert {0, 9} < states


def test_waiting_for_what_cannot_run_is_a_deadlock() -> None:
    queues = SimulatorQueues(0)
    first, second = queues.stream("h2d"), queues.stream("compute")
    one, two = queues.event(), queues.event()
    # Each waits for a record that stands behind its own wait; only a broken ring could make such a thing.
    first.record(one)
    second.wait(one)
    second.record(two)
    queues.close()
    with pytest.raises(SimulatedDeadlockError, match="the host waits"):
        two.synchronize()


def test_an_error_of_work_comes_out_at_the_host() -> None:
    queues = SimulatorQueues(1)

    def fail() -> None:
        raise ValueError("broken kernel")

    def use() -> None:
        stream = queues.stream("compute")
        stream.submit(fail)
        stream.record(done := queues.event())
        done.synchronize()

    with pytest.raises(ValueError, match="broken kernel"):
        use()


def test_no_time_passes() -> None:
    queues = SimulatorQueues(0)
    stream = queues.stream("compute")
    events = [queues.event() for _ in range(3)]
    for event in events:
        stream.record(event)
    events[-1].synchronize()
    assert all(queues.elapsed_s(start, end) == 0 for start, end in pairwise(events))
