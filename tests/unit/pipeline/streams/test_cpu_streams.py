"""Worker threads: errors travel through events, closures are dropped, delays are as asked, threads end."""

import gc
import threading
import time
import weakref

import pytest

from gapless.pipeline.streams.cpu import CpuQueues, Delays


class _Thing:
    """Something a closure can hold."""


def _fail() -> None:
    raise ValueError("broken kernel")


def test_an_error_reaches_the_host_through_every_event_that_depends_on_it() -> None:
    queues = CpuQueues()
    h2d, compute, d2h = (queues.stream(name) for name in ("h2d", "compute", "d2h"))
    before, after, result = queues.event(), queues.event(), queues.event()
    log: list[str] = []
    compute.submit(lambda: log.append("before"))
    compute.record(before)
    compute.submit(_fail)
    compute.submit(lambda: log.append("after"))
    compute.record(after)
    d2h.wait(after)
    d2h.submit(lambda: log.append("copied"))
    d2h.record(result)
    h2d.submit(lambda: log.append("another stream"))
    h2d.record(again := queues.event())

    began_s = time.monotonic()
    before.synchronize()
    again.synchronize()
    for event in (after, result):
        with pytest.raises(ValueError, match="broken kernel"):
            event.synchronize()
    assert time.monotonic() - began_s < 1
    assert sorted(log) == ["another stream", "before"], "a broken stream runs nothing more"

    compute.submit(lambda: log.append("later"))
    compute.record(later := queues.event())
    with pytest.raises(ValueError, match="broken kernel"):
        later.synchronize()
    queues.close()


def test_a_closure_is_dropped_once_it_has_run() -> None:
    queues = CpuQueues()
    stream = queues.stream("compute")
    thing = _Thing()
    watch = weakref.ref(thing)
    seen: list[bool] = []

    def work(thing: _Thing = thing) -> None:
        seen.append(thing is not None)

    stream.submit(work)
    del thing, work
    stream.record(done := queues.event())
    done.synchronize()
    # The mark is reached by a later item, so the closure's is gone, though the worker sleeps in its queue.
    deadline_s = time.monotonic() + 1
    while watch() is not None and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.002)

    assert seen == [True]
    assert watch() is None
    queues.close()


def test_delays_stretch_the_named_stream_only() -> None:
    queues = CpuQueues(Delays(fixed_s={"compute": 0.04}))

    def elapsed_s(name: str) -> float:
        stream, start, end = queues.stream(name), queues.event(), queues.event()
        stream.record(start)
        for _ in range(3):
            stream.submit(lambda: None)
        stream.record(end)
        end.synchronize()
        return queues.elapsed_s(start, end)

    assert elapsed_s("compute") >= 0.12
    # The best of several, since a busy machine has delays of its own.
    assert min(elapsed_s("d2h") for _ in range(5)) < 0.04
    queues.close()


def test_random_delays_are_those_of_their_seed() -> None:
    def total_s(seed: int) -> float:
        queues = CpuQueues(Delays(fixed_s={}, random_s=0.02, seed=seed))
        stream, start, end = queues.stream("compute"), queues.event(), queues.event()
        stream.record(start)
        for _ in range(5):
            stream.submit(lambda: None)
        stream.record(end)
        end.synchronize()
        queues.close()
        return queues.elapsed_s(start, end)

    totals = [total_s(seed) for seed in range(3)]
    assert all(0.0 < each < 1.0 for each in totals)
    assert len({round(each, 2) for each in totals}) > 1


def test_closing_ends_the_threads_and_drops_what_nobody_closed() -> None:
    before = threading.active_count()
    queues = CpuQueues()
    queues.stream("h2d")
    queues.stream("compute")
    assert threading.active_count() == before + 2
    queues.close()
    queues.close()
    assert threading.active_count() == before

    forgotten = CpuQueues()
    forgotten.stream("h2d")
    del forgotten
    gc.collect()
    assert threading.active_count() == before


def test_work_enqueued_before_closing_still_runs() -> None:
    queues = CpuQueues(Delays(fixed_s={"compute": 0.01}))
    log: list[int] = []
    stream = queues.stream("compute")
    for number in range(3):
        stream.submit(lambda number=number: log.append(number))
    queues.close()
    assert log == [0, 1, 2]
