"""Spans counted into bins of time, so that a run of any length becomes a picture of fixed width.

Pure functions over arrays: their cost is that of one pass over the spans, whatever the number of bins.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gapless.timeline.spans import Span

__all__ = ["Float64Array", "coarse_edges", "fine_edges", "shares_of_bins"]

Float64Array = NDArray[np.float64]

_MOST_BINS = 1200
_FEW_STEPS = 200
_STEPS_A_BIN = 8


def fine_edges(start_s: float, end_s: float, num_steps: int) -> Float64Array:
    """Where bins begin and end, ``[bins + 1]``, in seconds: much shorter than a step where there are few steps.

    So every gap of a short run is seen. Long runs get coarse bins, since bins about as long as a step would show a
    pattern that is not in the run.
    """
    if num_steps <= _FEW_STEPS:
        return np.linspace(start_s, end_s, _MOST_BINS + 1)
    return coarse_edges(start_s, end_s, num_steps)


def coarse_edges(start_s: float, end_s: float, num_steps: int) -> Float64Array:
    """Where bins begin and end, ``[bins + 1]``, in seconds: each holds several steps, whose average it shows."""
    return np.linspace(start_s, end_s, min(_MOST_BINS, max(1, num_steps // _STEPS_A_BIN)) + 1)


def shares_of_bins(spans: Sequence[Span], edges: Float64Array) -> Float64Array:
    """The share of each bin that the spans cover, ``[bins]``, each from 0 to 1.

    Args:
        spans: in order of time and without overlap.
        edges: ``[bins + 1]``, rising.
    """
    if not spans:
        return np.zeros(len(edges) - 1)
    knots = np.array(spans, dtype=np.float64)
    covered = np.zeros((len(spans), 2))
    covered[:, 1] = np.cumsum(knots[:, 1] - knots[:, 0])
    covered[1:, 0] = covered[:-1, 1]
    return np.diff(np.interp(edges, knots.ravel(), covered.ravel())) / np.diff(edges)
