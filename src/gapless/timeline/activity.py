"""How much of the time the device computed: :class:`DeviceActivity`, two sums that every engine keeps.

Busy is the time from after a step's last stream wait to the end of its last kernel. The window runs from the first
submit to the last collect, less the time the engine slept for want of requests. Their ratio is the device-active
share, a fraction from 0 to 1. What the device waited for, :mod:`gapless.timeline.recorder` tells where it is on.
Written by the engine thread; readers take a snapshot.
"""

import time
from dataclasses import dataclass

__all__ = ["ActivitySnapshot", "DeviceActivity"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivitySnapshot:
    """Totals so far, in seconds."""

    busy_s: float
    window_s: float

    def since(self, earlier: "ActivitySnapshot") -> "ActivitySnapshot":
        """What was added after ``earlier``."""
        return ActivitySnapshot(busy_s=self.busy_s - earlier.busy_s, window_s=self.window_s - earlier.window_s)

    @property
    def active_share(self) -> float | None:
        """Device-active share, or ``None`` when nothing ran."""
        return self.busy_s / self.window_s if self.window_s > 0 else None


class DeviceActivity:
    """Adds up busy time and the window it belongs to."""

    def __init__(self) -> None:
        self._totals = ActivitySnapshot(busy_s=0.0, window_s=0.0)
        self._window_start_s: float | None = None

    def submitted(self) -> None:
        """A step is about to be submitted."""
        if self._window_start_s is None:
            self._window_start_s = time.perf_counter()

    def collected(self, busy_s: float) -> None:
        """A step came back after ``busy_s`` of device time."""
        assert self._window_start_s is not None
        now = time.perf_counter()
        self._totals = ActivitySnapshot(
            busy_s=self._totals.busy_s + busy_s,
            window_s=self._totals.window_s + now - self._window_start_s,
        )
        self._window_start_s = now

    def slept(self) -> None:
        """Nothing to do: what follows, until the next submit, is not idle time of the device."""
        self._window_start_s = None

    def snapshot(self) -> ActivitySnapshot:
        """Totals at this moment."""
        return self._totals
