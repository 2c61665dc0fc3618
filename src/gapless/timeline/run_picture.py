"""A whole run: the device's busy and idle time above, the idle time by cause below.

Both are shares of bins of time, so a run of any length is drawn in the same time and at the same size.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gapless.timeline.palette import ASLEEP, BUSY, IDLE, TEXT, WEAK_TEXT
from gapless.timeline.shares import Float64Array, coarse_edges, fine_edges, shares_of_bins
from gapless.timeline.spans import Span

__all__ = ["draw_run"]

_ROUND_TOPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SHOWN_TOP_SHARE = 99.5  # percent of bins that the idle axes show whole; one slow first step may stick out


def draw_run(
    upper: Axes,
    lower: Axes,
    *,
    window: Span,
    num_steps: int,
    busy: Sequence[Span],
    idle: Mapping[str, Sequence[Span]],
    asleep: Sequence[Span],
    colours: Mapping[str, str],
) -> None:
    """Draw a run on two axes of the same width.

    Args:
        upper: for busy and idle time.
        lower: for idle time by cause, in a scale of its own.
        window: the time to draw.
        num_steps: computed in it.
        busy: when the device computed.
        idle: when it did not, by cause; the first cause is drawn lowest.
        asleep: when there was no request.
        colours: of each cause.
    """
    unit, scale = ("seconds", 1.0) if window.duration_s >= 2 else ("milliseconds", 1e3)
    fine, coarse = fine_edges(*window, num_steps), coarse_edges(*window, num_steps)
    sleeping = shares_of_bins(asleep, fine)
    active = shares_of_bins(busy, fine)
    _stack(upper, (fine - fine[0]) * scale, {BUSY: active, IDLE: 1 - active - sleeping, ASLEEP: sleeping})
    layers = {cause: shares_of_bins(spans, coarse) for cause, spans in idle.items()}
    _stack(lower, (coarse - coarse[0]) * scale, {colours[cause]: share for cause, share in layers.items()})
    lost = sum(layers.values(), np.zeros(len(coarse) - 1))
    upper.set_ylim(0, 1)
    lower.set_ylim(0, _top_of(lost))
    for axes, name in ((upper, "device"), (lower, "idle, by cause")):
        axes.set_xlim(0, window.duration_s * scale)
        axes.yaxis.set_major_formatter(lambda share, place: f"{share * 100:g} %")
        axes.set_ylabel(name, color=TEXT)
        axes.tick_params(colors=TEXT)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    upper.set_yticks([0, 0.5, 1])
    lower.set_yticks([0, lower.get_ylim()[1]])
    upper.tick_params(labelbottom=False)
    lower.set_xlabel(unit, color=WEAK_TEXT)
    handles = [Patch(color=BUSY, label="busy"), Patch(color=IDLE, label="idle")]
    if sleeping.any():
        handles.append(Patch(color=ASLEEP, label="no request"))
    _legend_beside(upper, handles)
    # As in the stack: the topmost layer first.
    _legend_beside(lower, [Patch(color=colours[cause], label=cause) for cause in reversed(layers)])


def _stack(axes: Axes, times: Float64Array, layers: Mapping[str, Float64Array]) -> None:
    """Draw layers, given by colour, one on the other."""
    floor = np.zeros(len(times) - 1)
    for colour, share in layers.items():
        top = floor + share
        if share.any():
            axes.stairs(top, times, baseline=floor, fill=True, color=colour, linewidth=0)
        floor = top


def _top_of(lost: Float64Array) -> float:
    """A round end of the scale that shows nearly every bin whole."""
    needed = float(np.percentile(lost, _SHOWN_TOP_SHARE)) if len(lost) else 0.0
    return next(top for top in _ROUND_TOPS if top >= min(1.0, needed))


def _legend_beside(axes: Axes, handles: Sequence[Patch]) -> None:
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.0, 1.05),
        frameon=False,
        fontsize=7.5,
        handlelength=1.2,
        labelcolor=TEXT,
        borderaxespad=0.4,
    )
