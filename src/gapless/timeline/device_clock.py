"""Device times on the host's clock: :class:`DeviceClock`, which never asks the host to wait.

A device tells only how much time passed between two events. Where a device's clock stands against the host's, nobody
says, but every step tells two bounds: its first event happened after the host began to enqueue it, and its last one
before the host saw it. Both are tight on a device that is waited for. So the clock keeps an interval for the time of
its reference event. From step to step the interval moves by the time that the device counted, grows by what two clocks
may drift apart meanwhile, and is cut by the new step's bounds (the interval intersection of K. Marzullo and S. Owicki,
"Maintaining the Time in a Distributed System", PODC 1983). The estimate moves as little as the interval allows, so
spans keep their lengths.

The reference is always an event of the latest step. Measuring from the start of the run instead would lose precision:
CUDA returns milliseconds as float32, which after an hour is good for a quarter of a millisecond only. After a long
sleep the interval has grown wide, and the next step's bounds set it anew.

Pure arithmetic on seconds. Engine thread only.
"""

import math

__all__ = ["DeviceClock"]


class DeviceClock:
    """Follows a device's clock.

    Args:
        max_drift: most seconds that the clocks drift apart in a second. Quartz is good to 50 parts in a million, and
            here are two of them; what float32 adds is less than a thousandth of that.
    """

    def __init__(self, max_drift: float = 1e-4) -> None:
        self._max_drift = max_drift
        self._time_s = math.nan
        self._earliest_s = -math.inf
        self._latest_s = math.inf

    @property
    def error_s(self) -> float:
        """How far the latest estimate may be off, in seconds; infinite before the first step."""
        if math.isnan(self._time_s):
            return math.inf
        return max(self._time_s - self._earliest_s, self._latest_s - self._time_s)

    def observe(self, elapsed_s: float, *, enqueued_s: float, seen_s: float, lasted_s: float) -> float:
        """Move on to a new reference event and return when it happened, on the host's clock.

        Args:
            elapsed_s: device seconds since the reference before this one; the first call may give anything.
            enqueued_s: when the host had not enqueued the event yet.
            seen_s: when the host had seen the end of what the event began.
            lasted_s: device seconds from the event to that end.
        """
        earliest_s, latest_s = enqueued_s, seen_s - lasted_s * (1 - self._max_drift)
        if earliest_s > latest_s:  # by what the device's clock rounds
            earliest_s, latest_s = latest_s, earliest_s
        if math.isnan(self._time_s):
            self._time_s = (earliest_s + latest_s) / 2
        else:
            drift_s = abs(elapsed_s) * self._max_drift
            self._time_s += elapsed_s
            known_earliest_s = self._earliest_s + elapsed_s - drift_s
            known_latest_s = self._latest_s + elapsed_s + drift_s
            # A step that contradicts what was known means that a clock was set: then the step alone counts.
            if known_earliest_s <= latest_s and earliest_s <= known_latest_s:
                earliest_s, latest_s = max(earliest_s, known_earliest_s), min(latest_s, known_latest_s)
        self._earliest_s, self._latest_s = earliest_s, latest_s
        self._time_s = min(max(self._time_s, earliest_s), latest_s)
        return self._time_s
