"""Draws ``ring_timeline.png``: the same steps with one and with two of them in flight.

The lanes are computed with the ring's own rules (what a stream waits for, where the host waits); the durations are
chosen for the picture and measured nowhere.

    python docs/pictures/ring_timeline.py
"""

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

SCHEDULE, WRITE, H2D, COMPUTE, D2H, APPLY = 1.1, 0.7, 0.4, 3.8, 0.4, 0.8
LANES = ("host", "h2d", "compute", "d2h")
BUFFERS = ("#2b6cb0", "#dd6b20")
WAIT, IDLE = "#e2e8f0", "#fff5f5"
END = 22.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Work of one step on one lane, or a wait."""

    lane: str
    start: float
    end: float
    step: int
    what: str


def timeline(depth: int, num_steps: int) -> list[Span]:
    """Spans of ``num_steps`` steps with at most ``depth`` in flight."""
    spans: list[Span] = []
    free = dict.fromkeys(LANES, 0.0)
    in_flight: deque[tuple[int, float]] = deque()

    def add(lane: str, after: float, duration: float, step: int, what: str) -> float:
        start = max(after, free[lane])
        free[lane] = start + duration
        spans.append(Span(lane=lane, start=start, end=free[lane], step=step, what=what))
        return free[lane]

    submitted = 0
    while submitted < num_steps or in_flight:
        if submitted < num_steps and len(in_flight) < depth:
            add("host", 0.0, SCHEDULE, submitted, "schedule")
            written = add("host", 0.0, WRITE, submitted, "write")
            h2d_done = add("h2d", written, H2D, submitted, "")
            compute_done = add("compute", h2d_done, COMPUTE, submitted, "carry-over, forward, sample")
            in_flight.append((submitted, add("d2h", compute_done, D2H, submitted, "")))
            submitted += 1
        if len(in_flight) == depth or submitted == num_steps:
            step, d2h_done = in_flight.popleft()
            if d2h_done > free["host"]:
                add("host", 0.0, d2h_done - free["host"], step, "wait")
            add("host", 0.0, APPLY, step, "apply")
    return spans


def draw(axes: Axes, depth: int, title: str) -> None:
    """Draw one depth's lanes, and mark where the compute lane is idle."""
    spans = [span for span in timeline(depth, 9) if span.start < END]
    for span in spans:
        y, width = -LANES.index(span.lane), min(span.end, END) - span.start
        waiting = span.what == "wait"
        color = WAIT if waiting else BUFFERS[span.step % 2]
        axes.barh(y, width, left=span.start, height=0.62, color=color, edgecolor="white", linewidth=1.2)
        if width < 0.6:
            continue
        where = span.start + width / 2
        label = span.what if span.lane == "host" else f"step {span.step}"
        small = 6.4 if span.lane == "host" else 8
        axes.text(where, y, label, ha="center", va="center", fontsize=small, color="#4a5568" if waiting else "white")
    busy = sorted((span.start, span.end) for span in spans if span.lane == "compute")
    for (_, end), (start, _) in pairwise(busy):
        if start - end > 1e-9:
            axes.barh(
                -2, start - end, left=end, height=0.62, color=IDLE, edgecolor="#e53e3e", hatch="////", linewidth=0.6
            )
    axes.set_yticks([-i for i in range(len(LANES))], LANES)
    axes.set_xlim(0, END)
    axes.set_ylim(-len(LANES) + 0.5, 0.5)
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def main() -> None:
    """Draw both depths into one picture beside this script."""
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(11, 4.6), dpi=140, constrained_layout=True)
    draw(upper, 1, "depth=1: the device waits while the host schedules, writes and applies")
    draw(lower, 2, "depth=2: the host prepares step N+1 while the device computes step N")
    lower.set_xlabel("time (the scale is the same; durations are illustrative)", fontsize=8)
    figure.legend(
        handles=[
            Patch(color=BUFFERS[0], label="even steps"),
            Patch(color=BUFFERS[1], label="odd steps"),
            Patch(color=WAIT, label="host waits for d2h_done"),
            Patch(facecolor=IDLE, edgecolor="#e53e3e", hatch="////", label="device idle"),
        ],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )
    figure.savefig(Path(__file__).with_suffix(".png"), metadata={"Software": None})


if __name__ == "__main__":
    main()
