"""The watchdog: late once, never when in time, and its thread ends."""

import threading
import time

from gapless.engine.watchdog import Watchdog


def test_a_block_that_takes_too_long_is_reported_once() -> None:
    late: list[float] = []
    watchdog = Watchdog(0.05, late.append)
    with watchdog.watching():
        time.sleep(0.4)
    with watchdog.watching():
        time.sleep(0.2)
    watchdog.close()
    assert late == [0.05]


def test_many_short_blocks_are_not_late() -> None:
    late: list[float] = []
    watchdog = Watchdog(0.6, late.append)
    for _ in range(80):
        with watchdog.watching():
            time.sleep(0.01)
    watchdog.close()
    assert late == []


def test_an_error_ends_the_watching() -> None:
    late: list[float] = []
    watchdog = Watchdog(0.05, late.append)
    try:
        with watchdog.watching():
            raise KeyError("x")
    except KeyError:
        pass
    time.sleep(0.2)
    watchdog.close()
    assert late == []


def test_the_thread_starts_when_needed_and_ends_when_closed() -> None:
    before = set(threading.enumerate())

    def watchers() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread not in before and "watchdog" in thread.name]

    watchdog = Watchdog(0.1, lambda waited_s: None)
    assert watchers() == []
    with watchdog.watching():
        [thread] = watchers()
    watchdog.close()
    thread.join(2)
    assert not thread.is_alive()
