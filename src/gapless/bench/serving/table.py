"""Levels as a table for a terminal, and what there is to say about them: :func:`serving_table`, :func:`remarks`."""

from collections.abc import Sequence

from rich.table import Table

from gapless.bench.serving.figures import Latency, LevelFigures
from gapless.bench.tables import milliseconds

__all__ = ["remarks", "serving_table"]

# Above this, a part of what is measured is the client's own work.
_BUSY_CLIENT = 0.85
_LATE_CLIENT_S = 0.05


def serving_table(levels: Sequence[LevelFigures]) -> Table:
    """One row a level; latencies in milliseconds: median / 90th / 99th percentile."""
    table = Table(
        title="p50 / p90 / p99 in ms", title_justify="left", title_style="bold", header_style="bold", padding=(0, 1)
    )
    kind = "rate" if levels and levels[0].kind == "rate" else "at once"
    has_targets = any(level.good_share is not None for level in levels)
    columns = [kind, "done", "req/s", "tokens/s", "TTFT", "TPOT", "ITL", "end to end"]
    for name in [*columns, *(["goodput"] if has_targets else [])]:
        table.add_column(name, justify="right")
    for level in levels:
        cells = [
            level.level,
            f"{level.completed}/{level.requests}",
            f"{level.requests_per_s:.2f}",
            f"{level.output_tokens_per_s:,.1f}",
            *map(_percentiles, (level.ttft, level.tpot, level.itl, level.end_to_end)),
        ]
        table.add_row(*cells, *([_goodput(level)] if has_targets else []))
    return table


def remarks(levels: Sequence[LevelFigures]) -> list[str]:
    """Lines on failures, and on a client that was too slow to measure."""
    lines = []
    for level in levels:
        for kind, count in level.failures.items():
            lines.append(f"{level.level}: {count} of {level.requests} failed: {kind}")
        if level.first_failure:
            lines.append(f"{level.level}: the first of them: {level.first_failure}")
        if level.client_busy > _BUSY_CLIENT or (level.lateness_p99_s or 0.0) > _LATE_CLIENT_S:
            late_ms = (level.lateness_p99_s or 0.0) * 1e3
            lines.append(
                f"{level.level}: this client computed {level.client_busy:.0%} of the time and sent up to {late_ms:.0f} "
                "ms late: its own work is part of these latencies; use several clients, or a faster machine"
            )
    return lines


def _percentiles(latency: Latency) -> str:
    if latency.p50_s is None:
        return "-"
    return " / ".join(milliseconds(each) for each in (latency.p50_s, latency.p90_s, latency.p99_s))


def _goodput(level: LevelFigures) -> str:
    if level.good_requests_per_s is None or level.good_share is None:
        return "-"
    return f"{level.good_requests_per_s:.2f}/s ({level.good_share:.0%})"
