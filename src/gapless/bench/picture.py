"""The comparison as a picture: each depth's time for a step, split into what the device did and what it waited for.

One panel a workload, one bar a depth. Every colour has its word in the legend and every bar its numbers, so the picture
can be read without telling colours apart. Pure functions; the file's ending chooses PNG or SVG.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gapless.bench.comparison import Comparison
from gapless.bench.summary import DepthSummary, summaries
from gapless.bench.workloads import Workload
from gapless.errors import ConfigError
from gapless.timeline.idle import IdleCause
from gapless.timeline.palette import ASLEEP, BUSY, TEXT, WEAK_TEXT

__all__ = ["PICTURE_ENDINGS", "check_picture_path", "draw_comparison"]

PICTURE_ENDINGS = (".png", ".svg")
_FLOOR = "#005C46"
# Warm colours for idle time, told apart from the green of work; hatches tell them apart from each other.
_IDLE_COLOURS = ("#D55E00", "#E69F00", "#F0E442", "#CC79A7", "#8C8C8C", "#B85C38", "#DDAA66", "#AA4499")
_HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
_BAR = 0.62
_LEAST_SHOWN_SHARE = 0.001


def check_picture_path(path: Path) -> None:
    """Refuse an ending that is no picture's.

    Raises:
        ConfigError: naming the ending.
    """
    if path.suffix.lower() not in PICTURE_ENDINGS:
        raise ConfigError(f"--picture {path} must end in {' or '.join(PICTURE_ENDINGS)}")


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Draw all workloads of a comparison into ``path``.

    Raises:
        OSError: it cannot be written.
    """
    workloads = comparison.plan.workloads
    depths = len(comparison.plan.depths)
    height = sum(0.9 + 0.42 * depths for _ in workloads) + 1.1
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none", "hatch.linewidth": 0.5}):
        figure = Figure(figsize=(9, height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(workloads), 1, squeeze=False)[:, 0]
        for axes, workload in zip(panels, workloads, strict=True):
            _draw_workload(axes, comparison, workload)
        handles = {label: handle for axes in panels for handle, label in _legend_of(axes)}
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, labelcolor=TEXT
        )
        figure.suptitle(f"{comparison.plan.model}: where a step's time goes", color=TEXT, x=0.01, ha="left")
        figure.savefig(path, dpi=160)


def _draw_workload(axes: Axes, comparison: Comparison, workload: Workload) -> None:
    found = summaries(comparison, workload)
    causes = [
        cause.value
        for cause in IdleCause
        if any(each.idle_shares.get(cause.value, 0) >= _LEAST_SHOWN_SHARE for each in found)
    ]
    for place, summary in enumerate(found):
        _draw_bar(axes, place, summary, causes)
    longest_ms = max(_step_ms(each) for each in found)
    axes.set_xlim(0, longest_ms * 1.32)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks(range(len(found)), [f"depth {each.depth}" for each in found])
    axes.set_xlabel("ms a step, on average", color=WEAK_TEXT)
    axes.set_title(workload.name, loc="left", fontsize=9, color=TEXT)
    axes.tick_params(colors=TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: Axes, place: int, summary: DepthSummary, causes: Sequence[str]) -> None:
    step_ms = _step_ms(summary)
    left = summary.active_share * step_ms
    axes.barh(place, left, height=_BAR, color=BUSY, label="device active")
    for cause in causes:
        width = summary.idle_shares.get(cause, 0.0) * step_ms
        number = [each.value for each in IdleCause].index(cause)
        axes.barh(
            place,
            width,
            left=left,
            height=_BAR,
            color=_IDLE_COLOURS[number % len(_IDLE_COLOURS)],
            hatch=_HATCHES[number % len(_HATCHES)],
            label=f"idle: {cause}",
        )
        left += width
    axes.barh(place, max(step_ms - left, 0), left=left, height=_BAR, color=ASLEEP, label="idle: other")
    floor_ms = summary.steps_floor_s / summary.num_steps * 1e3
    axes.plot([floor_ms] * 2, [place - _BAR / 2, place + _BAR / 2], color=_FLOOR, linewidth=2, label="roofline")
    axes.annotate(
        f"{summary.seconds:.2f} s, active {summary.active_share:.1%}",
        (step_ms, place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=TEXT,
    )


def _step_ms(summary: DepthSummary) -> float:
    return summary.seconds / summary.num_steps * 1e3


def _legend_of(axes: Axes) -> list[tuple[Artist, str]]:
    handles, labels = axes.get_legend_handles_labels()
    return list(zip(handles, labels, strict=True))
