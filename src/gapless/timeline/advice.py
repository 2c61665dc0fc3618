"""Whether host or device sets the pace, and which depth to run: :func:`advise`.

At depth 1 a step takes as long as host and device together. From depth 2 on they work at once, so it takes as long as
the slower of them; a third step in flight helps when the host is quick enough usually and late now and then. Pure
functions, for the summary of a timeline and for benchmarks alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

__all__ = ["Advice", "Bound", "advise"]

Bound = Literal["host", "device"]

_MAX_HIDING_DEPTH = 3
_LITTLE_IDLE = 0.02
_LATE = 99  # percentile of the host's times


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What a run's times say.

    Attributes:
        bound: who sets the pace: the one with more work a step.
        depth: the one to use for this workload on this machine.
        text: both in words, with the numbers, in one or two sentences.
    """

    bound: Bound
    depth: int
    text: str


def advise(*, host_s: Sequence[float], device_s: Sequence[float], depth: int, idle_share: float) -> Advice:
    """Judge a run.

    Args:
        host_s: for each step, what the host did for it without waiting, in seconds.
        device_s: for each step, how long the device computed, in seconds.
        depth: most steps in flight in this run.
        idle_share: of the time with work, the share in which the device was idle, from 0 to 1.
    """
    assert host_s
    assert device_s
    host, device = float(np.median(host_s)), float(np.median(device_s))
    late = float(np.percentile(host_s, _LATE))
    bound: Bound = "host" if host > device else "device"
    times = f"a step takes the host {_milliseconds(host)} and the device {_milliseconds(device)}"
    if bound == "host":
        wanted = max(depth, 2)
        text = f"host-bound: {times}. No depth hides that; more requests at once give the device more to do in a step"
        if depth == 1:
            text = f"host-bound: {times}, one after the other. Depth 2 lets them work at once, at the host's pace"
        return Advice(bound=bound, depth=wanted, text=text)
    if depth == 1:
        text = f"device-bound: {times}, one after the other. Depth 2 hides the host's part behind the device's"
        return Advice(bound=bound, depth=2, text=text)
    if depth > 2 and late <= device:
        text = f"device-bound: {times}, at the same time. Depth 2 hides that too, with less time to first token"
        return Advice(bound=bound, depth=2, text=text)
    if idle_share <= _LITTLE_IDLE:
        return Advice(bound=bound, depth=depth, text=f"device-bound: {times}, at the same time. Depth {depth} is right")
    if late > device and depth < _MAX_HIDING_DEPTH:
        text = f"device-bound: {times}, but one step in a hundred takes the host {_milliseconds(late)}"
        return Advice(bound=bound, depth=depth + 1, text=f"{text}. Depth {depth + 1} hides that")
    text = f"device-bound: {times}, at the same time. The rest of the idle time is not the host's pace: see its causes"
    return Advice(bound=bound, depth=depth, text=text)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
