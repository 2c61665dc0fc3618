"""What a soak came to: :func:`checks_of` holds it against its bounds, :func:`draw_soak` shows it. Pure functions.

Memory is judged over the second half, when caches and allocators have warmed up: a line is fitted by least squares, and
what it gains from the middle to the end must stay within a bound, whatever happened to be in use when a sample was
taken.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from health_probe import HealthAnswer
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gapless.bench.figures import percentile
from gapless.bench.report import environment
from gapless.timeline.palette import TEXT, WEAK_TEXT

MEMORY_GAIN_MIB = 8.0
HEALTH_WITHIN_MS = 500.0
_API, _ENGINE = "#0072B2", "#D55E00"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Both processes and the counters at one moment; totals count from the server's start."""

    at_s: float
    api_anonymous_mib: float
    api_resident_mib: float
    api_descriptors: int
    api_threads: int
    engine_anonymous_mib: float
    engine_resident_mib: float
    engine_descriptors: int
    engine_threads: int
    running: int
    waiting: int
    used_blocks: int
    all_blocks: int
    http_requests: int
    connections: int
    requests: int
    server_errors: int
    tokens: int
    aborted: int
    preempted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Soak:
    """One run.

    Attributes:
        server: the command.
        known: good requests with a known answer.
        runs: how many clients of each kind there were.
        outcomes: of good requests, and the number of faults.
        first, last: the server before anybody came, and after all had left.
        health: every answer of ``/health``.
        exit_code: after SIGTERM.
    """

    server: str
    seconds: float
    known: int
    runs: dict[str, int]
    outcomes: dict[str, int]
    faults: list[str]
    first: Sample
    last: Sample
    samples: list[Sample]
    health: list[HealthAnswer]
    exit_code: int
    traces_in_log: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise; ``bound`` says what ``value`` must be."""

    name: str
    value: Any
    bound: str
    holds: bool

    def __str__(self) -> str:
        return f"{'ok    ' if self.holds else 'FAILED'} {self.name}: {self.value} ({self.bound})"


def gain(samples: Sequence[Sample], name: str) -> float:
    """What a figure gains from the first to the last sample, by a line of least squares."""
    if len(samples) < 3:
        return 0.0
    times = [each.at_s for each in samples]
    values = [float(getattr(each, name)) for each in samples]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - middle) ** 2 for time in times)
    slope = sum((t - middle) * (v - mean) for t, v in zip(times, values, strict=True)) / spread
    return slope * (times[-1] - times[0])


def checks_of(soak: Soak) -> list[Check]:
    """Every promise."""
    first, last, second_half = soak.first, soak.last, soak.samples[len(soak.samples) // 2 :]
    checks = [
        equals("good answers that were wrong", soak.outcomes.get("wrong", 0), 0),
        equals("hangs, broken connections and wrong refusals", soak.outcomes.get("faults", 0), 0),
        at_least("good answers that were right", soak.outcomes.get("right", 0), 1),
        equals("answers with 5xx", last.server_errors, 0),
        equals("requests that run or wait in the engine at the end", last.running + last.waiting, 0),
        equals("KV blocks in use at the end", last.used_blocks, first.used_blocks),
        equals("KV blocks there are at the end", last.all_blocks, first.all_blocks),
        equals("HTTP requests under way at the end", last.http_requests, first.http_requests),
        equals("descriptors of the API process at the end", last.api_descriptors, first.api_descriptors),
        equals("descriptors of the engine process at the end", last.engine_descriptors, first.engine_descriptors),
        equals("threads of the engine process at the end", last.engine_threads, first.engine_threads),
    ]
    for process in ("api", "engine"):
        gained = round(gain(second_half, f"{process}_anonymous_mib"), 2)
        checks.append(at_most(f"MiB that the {process} process gains in the second half", gained, MEMORY_GAIN_MIB))
    failed = sum(answer.status != 200 for answer in soak.health)
    return [
        *checks,
        equals("answers of /health other than 200", failed, 0),
        at_most("ms to the slowest answer of /health", max(a.latency_ms for a in soak.health), HEALTH_WITHIN_MS),
        equals("traces in the log", soak.traces_in_log, 0),
        equals("exit code after SIGTERM", soak.exit_code, 0),
    ]


def equals(name: str, value: int, wanted: int) -> Check:
    """``value`` must be ``wanted``."""
    return Check(name=name, value=value, bound=f"must be {wanted}", holds=value == wanted)


def at_most(name: str, value: float, most: float) -> Check:
    """``value`` must not be above ``most``."""
    return Check(name=name, value=value, bound=f"at most {most:g}", holds=value <= most)


def at_least(name: str, value: float, least: float) -> Check:
    """``value`` must not be below ``least``."""
    return Check(name=name, value=value, bound=f"at least {least:g}", holds=value >= least)


def health_figures(answers: Sequence[HealthAnswer]) -> dict[str, Any]:
    """How ``/health`` was answered; latencies in milliseconds."""
    latencies = [answer.latency_ms for answer in answers]
    return {
        "answers": len(answers),
        "p50_ms": percentile(latencies, 50),
        "p99_ms": percentile(latencies, 99),
        "max_ms": max(latencies),
        "slower_than_500_ms": sum(latency > HEALTH_WITHIN_MS for latency in latencies),
    }


def report(soak: Soak, checks: Sequence[Check], device: str) -> dict[str, Any]:
    """Everything, ready to be written; samples as columns."""
    content = asdict(soak)
    content["samples"] = {each.name: [getattr(s, each.name) for s in soak.samples] for each in fields(Sample)}
    content["health"] = health_figures(soak.health)
    return {
        "environment": environment(torch.device("cuda" if device == "cuda" else "cpu")),
        "holds": all(check.holds for check in checks),
        "checks": [asdict(check) for check in checks],
        **content,
    }


def draw_soak(soak: Soak, path: Path) -> None:
    """Memory, descriptors and the load over time, and how long ``/health`` took.

    Raises:
        OSError: it cannot be written.
    """
    minutes = [sample.at_s / 60 for sample in soak.samples]

    def column(name: str) -> list[float]:
        return [getattr(sample, name) for sample in soak.samples]

    with mpl.rc_context({"font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 6), layout="constrained")
        FigureCanvasAgg(figure)
        memory, descriptors, load, health = figure.subplots(2, 2).flat
        for axes, name in ((memory, "anonymous_mib"), (descriptors, "descriptors")):
            axes.plot(minutes, column(f"api_{name}"), color=_API, label="API process")
            axes.plot(minutes, column(f"engine_{name}"), color=_ENGINE, label="engine process")
        load.plot(minutes, column("running"), color=_API, label="running")
        load.plot(minutes, column("waiting"), color=_ENGINE, label="waiting")
        times = [soak.seconds / 60 * place / len(soak.health) for place in range(len(soak.health))]
        health.plot(times, [answer.latency_ms for answer in soak.health], color=_API, linewidth=0.5, label="answers")
        health.axhline(HEALTH_WITHIN_MS, color=_ENGINE, linestyle="--", linewidth=1, label="bound")
        health.set_yscale("log")
        _finish(memory, "Anonymous memory and swap", "MiB")
        _finish(descriptors, "Descriptors", "open")
        _finish(load, "In the engine", "choices")
        _finish(health, "/health", "ms")
        title = f"{sum(soak.runs.values()):,} clients, {soak.outcomes.get('right', 0):,} right answers"
        figure.suptitle(title, color=TEXT, x=0.01, ha="left")
        figure.savefig(path, dpi=110)


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=9, color=TEXT)
    axes.set_ylabel(unit, color=WEAK_TEXT)
    axes.set_xlabel("minutes", color=WEAK_TEXT)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
