"""Which steps to look at closely: :func:`steady_steps` finds some that stand for the run."""

from collections.abc import Sequence

import numpy as np

from gapless.errors import ConfigError
from gapless.timeline.spans import DeviceLane, Recording, StepRecord

__all__ = ["steady_steps", "steps_from"]

_TYPICAL = 0.05


def steady_steps(recording: Recording, count: int) -> Sequence[StepRecord]:
    """``count`` steps in a row, of usual length and near the middle of the run; fewer if there are fewer.

    Of all runs of ``count`` steps in which the engine never slept, those are taken whose time differs from the median
    by at most 5 %, and among them the one nearest to the middle.
    """
    steps = recording.steps
    if len(steps) <= count:
        return steps
    compute = np.array([record.device[DeviceLane.COMPUTE] for record in steps], dtype=np.float64)
    lengths_s = compute[count - 1 :, 1] - compute[: len(steps) - count + 1, 0]
    firsts = np.arange(len(lengths_s))
    sleepless = np.ones(len(firsts), dtype=bool)
    for sleep in recording.sleeps:
        # The runs that hold both a step before the sleep and one after it.
        after = int(np.searchsorted(compute[:, 0], sleep.start_s))
        sleepless[max(0, after - count + 1) : after] = False
    if not sleepless.any():
        sleepless[:] = True
    median_s = float(np.median(lengths_s[sleepless]))
    off = np.abs(lengths_s - median_s)
    typical = sleepless & (off <= max(_TYPICAL * median_s, float(off[sleepless].min())))
    candidates = firsts[typical]
    first = int(candidates[np.argmin(np.abs(candidates - len(firsts) / 2))])
    return steps[first : first + count]


def steps_from(recording: Recording, first: int, count: int) -> Sequence[StepRecord]:
    """``count`` steps from the one with the number ``first``.

    Raises:
        ConfigError: the recording does not hold that step.
    """
    steps = recording.steps
    if not steps or not steps[0].step <= first <= steps[-1].step:
        held = f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps"
        raise ConfigError(f"zoom={first} is not recorded: the timeline holds {held}")
    index = first - steps[0].step
    return steps[index : index + count]
