"""The timeline as a picture: the whole run above, a few of its steps close up below.

Drawn with matplotlib's figure objects and never through pyplot, so it needs no screen and no window can open. While it
draws, matplotlib's settings are changed and then put back; do not draw from two threads at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gapless.errors import ConfigError
from gapless.timeline.idle import IdleCause, IdleReport, idle_report
from gapless.timeline.palette import IDLE_CAUSES, TEXT, WEAK_TEXT
from gapless.timeline.run_picture import draw_run
from gapless.timeline.spans import DeviceLane, Recording, Span, StepRecord
from gapless.timeline.steady_steps import steady_steps, steps_from
from gapless.timeline.summary import TimelineSummary, headline, summarise
from gapless.timeline.zoom_picture import draw_zoom

__all__ = ["PictureFormat", "draw_steps", "draw_timeline", "save_picture"]

PictureFormat = Literal["png", "svg"]

_ZOOM_STEPS = 5
_NEIGHBOURS = 16  # the deepest ring: work of steps that far away may reach into the time that is shown
_WIDTH_IN, _RUN_HEIGHT_IN, _ZOOM_HEIGHT_IN = 11.0, 3.4, 2.9
_DPI = 140
# Text of an SVG stays text: it can be searched, and is drawn with the reader's fonts.
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gapless",
    "font.family": "sans-serif",
    "font.size": 9,
    "hatch.linewidth": 0.8,
}


def draw_timeline(recording: Recording, *, zoom: int | None = None) -> Figure:
    """Draw a whole run and some of its steps.

    Args:
        recording: what to draw.
        zoom: number of the first step to show close up; ``None`` takes steps that stand for the run.

    Raises:
        ConfigError: the recording has no steps, or not the one of ``zoom``.
    """
    shown = _shown_steps(recording, zoom)
    with matplotlib.rc_context(_STYLE):
        figure = _figure(_RUN_HEIGHT_IN + _ZOOM_HEIGHT_IN)
        upper, lower, close_up = figure.subplots(3, 1, height_ratios=[1.1, 0.9, 2.2])
        report = idle_report(recording)
        _add_headline(figure, upper, summarise(recording, report))
        _draw_run(upper, lower, recording, report)
        _draw_zoom(close_up, recording, shown)
    return figure


def draw_steps(recording: Recording, *, zoom: int | None = None) -> Figure:
    """Draw only the close-up of :func:`draw_timeline`."""
    shown = _shown_steps(recording, zoom)
    with matplotlib.rc_context(_STYLE):
        figure = _figure(_ZOOM_HEIGHT_IN)
        _draw_zoom(figure.subplots(), recording, shown)
    return figure


def save_picture(figure: Figure, path: Path, kind: PictureFormat) -> None:
    """Write a figure; the same figure gives the same file."""
    nameless: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    with matplotlib.rc_context(_STYLE):
        figure.savefig(path, format=kind, dpi=_DPI, metadata=nameless[kind])


def _figure(height_in: float) -> Figure:
    return Figure(figsize=(_WIDTH_IN, height_in), layout="constrained", facecolor="white")


def _shown_steps(recording: Recording, zoom: int | None) -> Sequence[StepRecord]:
    if not recording.steps:
        raise ConfigError("the timeline holds no steps: generate something first")
    return steady_steps(recording, _ZOOM_STEPS) if zoom is None else steps_from(recording, zoom, _ZOOM_STEPS)


def _add_headline(figure: Figure, upper: Axes, summary: TimelineSummary) -> None:
    figure.suptitle(headline(summary), x=0.01, ha="left", fontsize=13, fontweight="bold", color=TEXT)
    about = [
        f"{summary.num_steps:,} step{'' if summary.num_steps == 1 else 's'}",
        f"depth {summary.depth}",
        summary.device_name,
    ]
    if summary.roofline.share is not None:
        about.append(f"decode steps at {summary.roofline.share:.0%} of the roofline")
    if summary.num_dropped:
        about.append(f"{summary.num_dropped:,} earlier steps left out")
    upper.set_title(",  ".join(about), loc="left", fontsize=9, color=WEAK_TEXT)


def _draw_run(upper: Axes, lower: Axes, recording: Recording, report: IdleReport) -> None:
    gaps: dict[IdleCause, list[Span]] = {cause: [] for cause in IdleCause}
    for part in report.parts:
        gaps[part.cause].append(part.span)
    asleep = gaps.pop(IdleCause.NO_WORK)
    # The cause that costs most lies at the bottom, where its height is read most easily.
    causes = sorted((cause for cause, spans in gaps.items() if spans), key=lambda each: -report.totals.idle_s[each])
    draw_run(
        upper,
        lower,
        window=report.window,
        num_steps=len(recording.steps),
        busy=[record.device[DeviceLane.COMPUTE] for record in recording.steps],
        idle={cause.value: gaps[cause] for cause in causes},
        asleep=asleep,
        colours={cause.value: IDLE_CAUSES[cause] for cause in causes},
    )


def _draw_zoom(axes: Axes, recording: Recording, shown: Sequence[StepRecord]) -> None:
    first, last = shown[0].step, shown[-1].step
    begin = max(0, first - recording.steps[0].step - _NEIGHBOURS)
    draw_zoom(axes, recording.steps[begin : begin + len(shown) + 2 * _NEIGHBOURS], shown)
    title = f"steps {first:,} to {last:,}" if last > first else f"step {first:,}"
    axes.set_title(title, loc="left", fontsize=9, color=WEAK_TEXT)
