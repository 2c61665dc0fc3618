"""A few steps close up: what host and queues did, lane below lane, with a colour for each set of step buffers.

The host's lane shows phases by colour and, in the stripe below them, whose buffers they worked on. So one sees the host
prepare step N+1 in one set of buffers while the device computes step N from another.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gapless.timeline.lanes import LaneSpan, buffers_name, device_lane, host_lane
from gapless.timeline.palette import IDLE, PHASES, TEXT, WEAK_TEXT, buffers_colour
from gapless.timeline.spans import DeviceLane, HostPhase, Span, StepRecord

__all__ = ["draw_zoom"]

_LANES = ("host", *(lane.value for lane in DeviceLane))
_HEIGHT = 0.66
_STRIPE = 0.16
_ROOM_A_LETTER = 0.0062  # of the axes' width, at the size of the labels
_EDGED = 4e-3  # of the axes' width
_LEAST_GAP = 1e-3  # of the axes' width: a shorter one would be all outline
_DARK_TEXT_ON = ("#E3E6EA", "#E69F00", "#56B4E9", "#F0E442", "#CC79A7", "#44AA99")


def draw_zoom(axes: Axes, records: Sequence[StepRecord], shown: Sequence[StepRecord]) -> None:
    """Draw the time in which ``shown`` are prepared, computed and applied.

    Args:
        records: these steps and their neighbours, whose work reaches into that time.
        shown: the steps to look at.
    """
    window = Span(shown[0].device[DeviceLane.COMPUTE].start_s, shown[-1].device[DeviceLane.COMPUTE].end_s)
    margin_s = 0.03 * window.duration_s
    window = Span(window.start_s - margin_s, window.end_s + margin_s)
    for span in _inside(host_lane(records), window):
        _draw_host_span(axes, span, window)
    for lane in DeviceLane:
        for span in _inside(device_lane(records, lane), window):
            _draw_device_span(axes, span, window, lane)
    _draw_gaps(axes, list(_inside(device_lane(records, DeviceLane.COMPUTE), window)), window)
    axes.set_yticks([-place for place in range(len(_LANES))], _LANES)
    axes.set_xlim(0, window.duration_s * 1e3)
    axes.set_ylim(-len(_LANES) + 0.5, 0.5)
    axes.set_xlabel("milliseconds", color=WEAK_TEXT)
    axes.tick_params(left=False, colors=TEXT)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    _add_legend(axes, shown)


def _inside(spans: Sequence[LaneSpan], window: Span) -> Iterator[LaneSpan]:
    """What of the spans lies in the window."""
    for span in spans:
        start_s, end_s = max(span.start_s, window.start_s), min(span.end_s, window.end_s)
        if end_s > start_s:
            yield LaneSpan(start_s=start_s, end_s=end_s, what=span.what, record=span.record)


def _draw_host_span(axes: Axes, span: LaneSpan, window: Span) -> None:
    assert isinstance(span.what, HostPhase)
    colour, bottom = PHASES[span.what], -_HEIGHT / 2
    _draw_bar(axes, span, window, colour, bottom=bottom, height=_HEIGHT)
    _draw_bar(axes, span, window, buffers_colour(span.record.buffers), bottom=bottom, height=_STRIPE)
    _label(axes, str(span.what.value), span, window, bottom + _STRIPE + (_HEIGHT - _STRIPE) / 2, colour)


def _draw_device_span(axes: Axes, span: LaneSpan, window: Span, lane: DeviceLane) -> None:
    place, colour = -_LANES.index(lane.value), buffers_colour(span.record.buffers)
    _draw_bar(axes, span, window, colour, bottom=place - _HEIGHT / 2, height=_HEIGHT)
    name = buffers_name(span.record.buffers)
    step = f"{name}: step {span.record.step:,}"
    for text in (f"{step}, {_contents(span.record)}", step, name):
        if _label(axes, text, span, window, place, colour):
            return


def _draw_bar(axes: Axes, span: LaneSpan, window: Span, colour: str, *, bottom: float, height: float) -> None:
    left, width = (span.start_s - window.start_s) * 1e3, (span.end_s - span.start_s) * 1e3
    # A white edge parts a bar from its neighbour, and would be all that is left of a narrow one.
    wide = width * 1e-3 > _EDGED * window.duration_s
    axes.bar(
        left,
        height,
        width,
        bottom,
        align="edge",
        color=colour,
        edgecolor="white" if wide and height > _STRIPE else colour,
        linewidth=0.6,
        zorder=1.5 if wide else 2,
    )


def _draw_gaps(axes: Axes, computing: Sequence[LaneSpan], window: Span) -> None:
    """Mark where nothing computed between two steps."""
    place = -_LANES.index(DeviceLane.COMPUTE.value)
    for before, after in pairwise(computing):
        if after.start_s - before.end_s < _LEAST_GAP * window.duration_s:
            continue
        left, width = (before.end_s - window.start_s) * 1e3, (after.start_s - before.end_s) * 1e3
        axes.bar(
            left,
            _HEIGHT,
            width,
            place - _HEIGHT / 2,
            align="edge",
            color="white",
            edgecolor=IDLE,
            hatch="/////",
            linewidth=0.6,
        )


def _contents(record: StepRecord) -> str:
    if record.num_prefill_tokens:
        return f"{record.num_tokens:,} tokens"
    return f"{record.num_entries:,} rows"


def _label(axes: Axes, text: str, span: LaneSpan, window: Span, y: float, colour: str) -> bool:
    """Write into a bar; say whether there was room."""
    share = (span.end_s - span.start_s) / window.duration_s
    if share < _ROOM_A_LETTER * (len(text) + 1):
        return False
    x = ((span.start_s + span.end_s) / 2 - window.start_s) * 1e3
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color=TEXT if colour in _DARK_TEXT_ON else "white")
    return True


def _add_legend(axes: Axes, shown: Sequence[StepRecord]) -> None:
    buffers = sorted({record.buffers for record in shown})
    handles = [Patch(color=colour, label=phase.value) for phase, colour in PHASES.items()]
    handles += [Patch(color=buffers_colour(each), label=f"buffers {buffers_name(each)}") for each in buffers]
    handles.append(Patch(facecolor="white", edgecolor=IDLE, hatch="/////", label="device idle"))
    axes.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.24),
        ncols=len(handles),
        frameon=False,
        fontsize=7.5,
        handlelength=1.2,
        columnspacing=1.2,
        labelcolor=TEXT,
    )
