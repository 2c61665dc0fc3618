"""A device's clock on the host's: the truth stays within the stated error, whatever offset, drift and jitter there are.

Two synthetic clocks: the device's runs off by a constant and by parts in a million, and tells elapsed time as float32
milliseconds, like CUDA.
"""

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.timeline.device_clock import DeviceClock

US = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticDevice:
    """Runs away from the host by ``drift`` seconds a second."""

    drift: float

    def elapsed_s(self, start_s: float, end_s: float) -> float:
        """What it tells of two moments of the host's clock."""
        return as_float32((end_s - start_s) * (1 + self.drift) * 1e3) / 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A reference event: when it happened, what the clock says, and how far that may be off."""

    true_s: float
    told_s: float
    error_s: float


def as_float32(value: float) -> float:
    """Round."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def follow(
    clock: DeviceClock,
    device: SyntheticDevice,
    *,
    num_steps: int,
    step_s: float,
    before_us: tuple[float, float] = (2, 15),
    after_us: tuple[float, float] = (4, 30),
    late_share: float = 0.0,
    pauses_s: dict[int, float] | None = None,
    seed: int = 0,
) -> Iterator[Estimate]:
    """A run of steps.

    Args:
        before_us: bounds of the time between the start of enqueueing and the event.
        after_us: bounds of the time between the end on the device and the host's sight of it.
        late_share: share of steps that the host sees a whole step too late.
        pauses_s: nothing runs so long before a step.
    """
    draw = random.Random(seed)
    now_s, reference_s = 12_345.678, None
    for step in range(num_steps):
        now_s += (pauses_s or {}).get(step, 0.0)
        enqueued_s = now_s
        event_s = enqueued_s + draw.uniform(*before_us) * US
        end_s = event_s + step_s * draw.uniform(0.5, 1.5)
        seen_s = end_s + draw.uniform(*after_us) * US + (step_s if draw.random() < late_share else 0.0)
        told_s = clock.observe(
            0.0 if reference_s is None else device.elapsed_s(reference_s, event_s),
            enqueued_s=enqueued_s,
            seen_s=seen_s,
            lasted_s=device.elapsed_s(event_s, end_s),
        )
        yield Estimate(true_s=event_s, told_s=told_s, error_s=clock.error_s)
        now_s, reference_s = seen_s + 100 * US, event_s


def test_nothing_is_known_before_the_first_step() -> None:
    assert DeviceClock().error_s == math.inf


@pytest.mark.parametrize("drift", [0.0, 50e-6, -50e-6])
def test_a_drifting_clock_is_followed(drift: float) -> None:
    estimates = list(follow(DeviceClock(), SyntheticDevice(drift=drift), num_steps=20_000, step_s=0.006))

    assert estimates[-1].true_s - estimates[0].true_s > 100, "the drift is 5 ms by then"
    assert all(abs(each.told_s - each.true_s) <= each.error_s + 0.1 * US for each in estimates)
    # An estimate from one step is good to 20 us; more of them cut each other's jitter.
    assert max(each.error_s for each in estimates) < 25 * US
    errors = sorted(abs(each.told_s - each.true_s) for each in estimates[100:])
    assert errors[len(errors) // 2] < 10 * US


def test_a_host_that_sees_steps_late_costs_little() -> None:
    estimates = list(follow(DeviceClock(), SyntheticDevice(drift=50e-6), num_steps=5000, step_s=0.006, late_share=0.9))

    assert all(abs(each.told_s - each.true_s) <= each.error_s + 0.1 * US for each in estimates)
    assert max(each.error_s for each in estimates[100:]) < 120 * US


def test_spans_keep_their_lengths() -> None:
    device = SyntheticDevice(drift=50e-6)
    estimates = list(follow(DeviceClock(), device, num_steps=5000, step_s=0.006))

    moves = []
    for before, after in pairwise(estimates):
        moves.append(after.told_s - before.told_s - device.elapsed_s(before.true_s, after.true_s))
    # Between two steps the estimate moves by the drift, and once in a while by as much as a bound cuts.
    assert sorted(map(abs, moves[100:]))[int(0.99 * len(moves[100:]))] < 5 * US


def test_after_a_long_sleep_the_next_step_sets_the_clock() -> None:
    estimates = list(
        follow(DeviceClock(), SyntheticDevice(drift=50e-6), num_steps=300, step_s=0.006, pauses_s={200: 8 * 3600.0})
    )

    assert all(abs(each.told_s - each.true_s) <= each.error_s + 0.1 * US for each in estimates)
    assert max(each.error_s for each in estimates) < 25 * US


def test_a_clock_that_was_set_is_believed_again() -> None:
    clock = DeviceClock()
    clock.observe(0.0, enqueued_s=10.0, seen_s=10.0101, lasted_s=0.01)
    told_s = clock.observe(5.0, enqueued_s=10.02, seen_s=10.0301, lasted_s=0.01)

    assert told_s == pytest.approx(10.02, abs=200 * US)
    assert clock.error_s < 200 * US


def test_a_shared_clock_is_exact() -> None:
    clock = DeviceClock()
    for time_s in (1.0, 2.5, 1000.0):
        assert clock.observe(0.0, enqueued_s=time_s, seen_s=time_s, lasted_s=0.0) == time_s
        assert clock.error_s == 0.0


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    drift=st.floats(-90e-6, 90e-6),
    step_s=st.floats(20e-6, 0.2),
    after_us=st.floats(1, 5000),
    late_share=st.floats(0, 1),
    pause_s=st.floats(0, 10_000),
    seed=st.integers(0, 1000),
)
def test_the_truth_is_within_the_stated_error(
    drift: float, step_s: float, after_us: float, late_share: float, pause_s: float, seed: int
) -> None:
    run = follow(
        DeviceClock(),
        SyntheticDevice(drift=drift),
        num_steps=60,
        step_s=step_s,
        after_us=(0.5, after_us),
        late_share=late_share,
        pauses_s={30: pause_s},
        seed=seed,
    )
    for each in run:
        assert abs(each.told_s - each.true_s) <= each.error_s + 0.1 * US
