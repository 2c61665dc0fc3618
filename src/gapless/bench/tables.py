"""What was measured as tables for a terminal: of depths, of latencies, and of how a step grows. Pure functions."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from gapless.bench.comparison import Comparison
from gapless.bench.growth import Cell, Growth
from gapless.bench.summary import DepthSummary, LatencySummary, summaries
from gapless.bench.workloads import Workload

__all__ = ["depth_table", "growth_table", "latency_table", "milliseconds"]

_SHOWN_CAUSES = 3
_LEAST_SHOWN_SHARE = 0.0005


def depth_table(comparison: Comparison, workload: Workload) -> Table:
    """How fast each depth was, and where the device's time went."""
    found = summaries(comparison, workload)
    streamed = any(request.streams for request in workload.requests)
    table = _table(workload.name, ["depth", "seconds", "tokens/s", "ms/step", "p99"])
    for name in ("device active", "of roofline", "idle by cause", "TTFT ms"):
        table.add_column(name, justify="left" if name == "idle by cause" else "right")
    if streamed:
        table.add_column("ITL ms", justify="right")
    for each in found:
        cells = [
            str(each.depth),
            _seconds(each),
            f"{each.output_tokens_per_s:,.1f}",
            milliseconds(each.step_p50_s),
            milliseconds(each.step_p99_s),
            f"{each.active_share:.2%}",
            "-" if each.roofline_share is None else f"{each.roofline_share:.1%}",
            _idle(each.idle_shares),
            milliseconds(each.ttft.p50_s),
        ]
        table.add_row(*cells, *([milliseconds(each.itl.p50_s)] if streamed else []))
    return table


def latency_table(comparison: Comparison, workloads: Sequence[Workload]) -> Table:
    """Latencies of each workload and depth in milliseconds: median / 90th / 99th percentile over all requests."""
    table = _table("p50 / p90 / p99 in ms", ["requests", "depth", "TTFT", "TPOT", "ITL", "end to end", "tokens/s"])
    table.add_column("device active", justify="right")
    for workload in workloads:
        for each in summaries(comparison, workload):
            latencies = (each.ttft, each.tpot, each.itl, each.end_to_end)
            table.add_row(
                str(len(workload.requests)),
                str(each.depth),
                *map(_percentiles, latencies),
                f"{each.output_tokens_per_s:,.1f}",
                f"{each.active_share:.2%}",
            )
    return table


def growth_table(growth: Growth) -> Table:
    """A decode step's milliseconds by requests and context, with the share of the roofline, and the host's beside."""
    plan = growth.plan
    table = _table("ms of device time a decode step (share of the roofline)", ["requests", "host ms"])
    for context in plan.contexts:
        table.add_column(f"context {context:,}", justify="right")
    for requests in plan.requests:
        cells = [_cell(growth.cell(requests, context)) for context in plan.contexts]
        table.add_row(str(requests), milliseconds(growth.host_s[requests]), *cells)
    return table


def milliseconds(seconds: float | None) -> str:
    """A time in milliseconds with three or more digits that count, or a dash."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _cell(cell: Cell) -> str:
    if cell.device_s is None or cell.roofline_share is None:
        return cell.state
    return f"{milliseconds(cell.device_s)} ({cell.roofline_share:.0%})"


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _seconds(summary: DepthSummary) -> str:
    text = f"{summary.seconds:.3f}" if summary.seconds < 10 else f"{summary.seconds:.2f}"
    return f"{text} ± {summary.spread / 2:.1%}" if summary.num_rounds > 1 else text


def _idle(shares: dict[str, float]) -> str:
    shown = [f"{cause} {share:.1%}" for cause, share in shares.items() if share >= _LEAST_SHOWN_SHARE]
    return ", ".join(shown[:_SHOWN_CAUSES]) or "none"


def _percentiles(latency: LatencySummary) -> str:
    if latency.p50_s is None:
        return "-"
    return " / ".join(milliseconds(each) for each in (latency.p50_s, latency.p90_s, latency.p99_s))
