"""A recording as numbers for machines: :func:`numbers_of`, a tree of JSON values.

Times are seconds; those of the steps count from the first submit. Shares are fractions, 0 to 1. Pure functions.
"""

import platform
from dataclasses import asdict
from importlib import metadata
from typing import Any, TypeAlias

import torch

from gapless.timeline.idle import idle_report
from gapless.timeline.lanes import buffers_name
from gapless.timeline.roofline import Roofline, step_share
from gapless.timeline.spans import DeviceLane, HostPhase, Recording, StepRecord
from gapless.timeline.summary import TimelineSummary, summarise

__all__ = ["FORMAT", "JsonTree", "numbers_of"]

FORMAT = 1
"""Of the tree; it rises when a field changes its meaning or goes."""

JsonTree: TypeAlias = dict[str, Any]

_COUNTS = ("num_entries", "num_tokens", "num_prefill_tokens", "num_samples", "num_context_tokens")
_COLUMNS = (
    "step",
    "buffers",
    "launch",
    *_COUNTS,
    *(f"{each.value}_{edge}_s" for each in (*HostPhase, *DeviceLane) for edge in ("start", "end")),
    "roofline_share",
)


def numbers_of(recording: Recording) -> JsonTree:
    """Environment, sums, idle time by cause, share of the roofline, and a row for each step."""
    report = idle_report(recording)
    summary = summarise(recording, report)
    origin_s = report.window.start_s
    return {
        "format": FORMAT,
        "environment": {
            "gapless": _version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": recording.limits.device_name,
        },
        "engine": {"depth": recording.depth, "limits": asdict(recording.limits)},
        "totals": _totals(summary),
        "idle_s": {cause.value: seconds for cause, seconds in summary.idle.idle_s.items()},
        "roofline": _roofline(summary.roofline),
        "host": {
            "work": asdict(summary.host),
            "phases": {phase.value: asdict(times) for phase, times in summary.phases.items()},
        },
        "compute": asdict(summary.compute),
        "launches": summary.launches,
        "advice": None if summary.advice is None else asdict(summary.advice),
        "steps": {"columns": _COLUMNS, "rows": [_row(step, recording, origin_s) for step in recording.steps]},
    }


def _version() -> str:
    try:
        return metadata.version("gapless")
    except metadata.PackageNotFoundError:
        return "not installed, run from its sources"


def _totals(summary: TimelineSummary) -> JsonTree:
    return {
        "steps": summary.num_steps,
        "dropped_steps": summary.num_dropped,
        "steps_in_flight": summary.num_in_flight,
        "wall_s": summary.wall_s,
        "no_work_s": summary.idle.no_work_s,
        "window_s": summary.idle.window_s,
        "busy_s": summary.idle.busy_s,
        "device_active": summary.idle.device_active,
        "clock_error_s": summary.clock_error_s,
    }


def _roofline(roofline: Roofline) -> JsonTree:
    return {
        "decode_steps": roofline.decode_steps,
        "read_bytes": roofline.read_bytes,
        "read_bytes_per_s": roofline.read_bytes_per_s,
        "busy_s": roofline.busy_s,
        "elapsed_s": roofline.elapsed_s,
        "share": roofline.share,
        "busy_share": roofline.busy_share,
    }


def _row(record: StepRecord, recording: Recording, origin_s: float) -> list[Any]:
    spans = [record.host[phase] for phase in HostPhase] + [record.device[lane] for lane in DeviceLane]
    return [
        record.step,
        buffers_name(record.buffers),
        record.launch,
        *(getattr(record, name) for name in _COUNTS),
        # To the nanosecond, which is finer than either clock.
        *(round(time_s - origin_s, 9) for span in spans for time_s in span),
        step_share(record, recording.limits),
    ]
