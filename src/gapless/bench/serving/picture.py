"""Levels as a picture: :func:`draw_levels`, how throughput and latency change with the load. Pure functions.

Four panels over the load: tokens a second, time to first token, time between tokens, and goodput (or, without targets,
end-to-end latency). A single level has nothing to be compared with and is drawn as points.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gapless.bench.serving.figures import Latency, LatencyTargets, LevelFigures
from gapless.timeline.palette import TEXT, WEAK_TEXT

__all__ = ["draw_levels"]

_MEDIAN, _TAIL = "#0072B2", "#D55E00"
_TARGET = "#8C8C8C"


def draw_levels(levels: Sequence[LevelFigures], targets: LatencyTargets, title: str, path: Path) -> None:
    """Draw all levels of a benchmark.

    Args:
        levels: of one kind, in any order.
        targets: drawn as lines.
        title: above everything.
        path: a PNG or SVG file.

    Raises:
        OSError: it cannot be written.
    """
    ordered = sorted(levels, key=lambda level: level.value)
    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        FigureCanvasAgg(figure)
        throughput, ttft, itl, last = figure.subplots(2, 2).flat
        _line(throughput, ordered, lambda level: level.output_tokens_per_s, "output tokens", _MEDIAN, "o")
        _finish(throughput, ordered, "Throughput", "tokens/s")
        _latency(ttft, ordered, lambda level: level.ttft, targets.ttft_s, "Time to first token")
        _latency(itl, ordered, lambda level: level.itl, targets.itl_s, "Time between tokens")
        if targets.is_set:
            _line(last, ordered, lambda level: level.requests_per_s, "complete", _TARGET, "s")
            _line(last, ordered, lambda level: level.good_requests_per_s, "within the targets", _MEDIAN, "o")
            _finish(last, ordered, "Goodput", "requests/s")
        else:
            _latency(last, ordered, lambda level: level.end_to_end, None, "End to end")
        figure.suptitle(title, color=TEXT, x=0.01, ha="left")
        figure.savefig(path, dpi=160)


def _latency(
    axes: Axes,
    levels: Sequence[LevelFigures],
    latency: Callable[[LevelFigures], Latency],
    target_s: float | None,
    title: str,
) -> None:
    _line(axes, levels, lambda level: _ms(latency(level).p50_s), "median", _MEDIAN, "o")
    _line(axes, levels, lambda level: _ms(latency(level).p99_s), "99th percentile", _TAIL, "^")
    if target_s is not None:
        axes.axhline(target_s * 1e3, color=_TARGET, linestyle="--", linewidth=1, label="target")
    _finish(axes, levels, title, "ms")


def _line(
    axes: Axes,
    levels: Sequence[LevelFigures],
    value: Callable[[LevelFigures], float | None],
    label: str,
    colour: str,
    marker: str,
) -> None:
    points = [(level.value, found) for level in levels if (found := value(level)) is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], color=colour, marker=marker, markersize=4, label=label)


def _finish(axes: Axes, levels: Sequence[LevelFigures], title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=TEXT)
    axes.set_ylabel(unit, color=WEAK_TEXT)
    axes.set_xlabel("requests/s" if levels[0].kind == "rate" else "requests at once", color=WEAK_TEXT)
    values = [level.value for level in levels]
    if max(values) / min(values) > 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.tick_params(colors=TEXT)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(axes.lines) > 1:
        axes.legend(frameon=False, labelcolor=TEXT, fontsize=8)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
