"""A summary for a terminal: :func:`summary_table`, made of rich's tables.

It holds no cursor movement and no fixed width, so it can be printed to a file or a pipe as well. Pure functions.
"""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gapless.timeline.palette import BUSY, IDLE
from gapless.timeline.spans import HostPhase
from gapless.timeline.summary import Distribution, TimelineSummary, headline, shown_time

__all__ = ["summary_table"]

_BAR_WIDTH = 24
_LAUNCH_WORDS = {"graph": "as a graph", "kernels": "kernel by kernel", "capture": "kernel by kernel, and captured"}


def summary_table(summary: TimelineSummary) -> RenderableType:
    """Everything a summary says, for ``rich.print``."""
    if summary.advice is None:
        return Text(headline(summary))
    parts: list[RenderableType] = [Text(headline(summary), style="bold"), _facts(summary), Text()]
    parts += [_idle_table(summary), Text(), _host_table(summary), Text(), Text(summary.advice.text + ".")]
    return Group(*parts)


def _facts(summary: TimelineSummary) -> Table:
    facts = Table.grid(padding=(0, 2))
    dropped = f" ({summary.num_dropped:,} earlier ones left out)" if summary.num_dropped else ""
    facts.add_row("steps", f"{summary.num_steps:,}{dropped}, depth {summary.depth}, on {summary.device_name}")
    facts.add_row("launched", ", ".join(f"{count:,} {_LAUNCH_WORDS[how]}" for how, count in _by_count(summary)))
    facts.add_row("wall time", f"{summary.wall_s:,.2f} s{_without_work(summary)}")
    facts.add_row("roofline", _roofline(summary))
    facts.add_row("clocks", _clocks(summary))
    return facts


def _clocks(summary: TimelineSummary) -> str:
    if not summary.clock_error_s:
        return "the device's times were taken with the host's clock"
    return f"device times are within {summary.clock_error_s * 1e6:,.1f} µs of the host's clock"


def _by_count(summary: TimelineSummary) -> list[tuple[str, int]]:
    return sorted(summary.launches.items(), key=lambda each: -each[1])


def _without_work(summary: TimelineSummary) -> str:
    return f", {summary.idle.no_work_s:,.2f} s of it without any request" if summary.idle.no_work_s > 0 else ""


def _roofline(summary: TimelineSummary) -> str:
    roofline = summary.roofline
    if not roofline.decode_steps:
        return "no decode steps"
    if roofline.share is None or roofline.busy_share is None:
        return "the device's read bandwidth was not measured"
    return f"{roofline.share:.1%} in {roofline.decode_steps:,} decode steps ({roofline.busy_share:.1%} while computing)"


def _idle_table(summary: TimelineSummary) -> Table:
    """Seconds and share of each cause, the largest first."""
    window_s = summary.idle.window_s
    causes = sorted(summary.idle.idle_s.items(), key=lambda each: -each[1])
    causes = [(cause, seconds) for cause, seconds in causes if seconds > 0]
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for name, side in (("device", "left"), ("time", "right"), ("share", "right"), ("of the idle time", "left")):
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    busy_s = summary.idle.busy_s
    table.add_row("busy", shown_time(busy_s), f"{busy_s / window_s:.2%}", "", style=BUSY)
    idle_s = sum(seconds for _, seconds in causes)
    for cause, seconds in causes:
        bar = Text("█" * max(1, round(seconds / idle_s * _BAR_WIDTH)), style=IDLE)
        table.add_row(f"idle: {cause.value}", shown_time(seconds), f"{seconds / window_s:.2%}", bar)
    return table


def _host_table(summary: TimelineSummary) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("ms a step", no_wrap=True)
    for name in ("median", "99th percentile"):
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[str, Distribution]] = [("device computes", summary.compute)]
    rows += [("host, without waiting", summary.host)]
    rows += [(f"  {phase.value}", summary.phases[phase]) for phase in HostPhase if phase is not HostPhase.WAIT]
    rows += [("host waits", summary.phases[HostPhase.WAIT])]
    for name, times in rows:
        table.add_row(name, f"{times.median_ms:.3f}", f"{times.p99_ms:.3f}")
    return table
