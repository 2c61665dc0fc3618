"""What the numbers say, in words: :func:`verdict`, the depth to use and what holds the run back.

It claims only what was measured: a depth beats another if it is faster in every round, and by 1 % in the median. Pure
functions.
"""

import statistics
from dataclasses import dataclass
from typing import Literal

from gapless.bench.comparison import Comparison
from gapless.bench.growth import Growth
from gapless.bench.summary import DepthSummary, summaries
from gapless.bench.workloads import Workload

__all__ = ["Verdict", "growth_lines", "tokens_verdict", "verdict"]

Bound = Literal["device-bound", "host-bound"]

_LEAST_GAIN = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a comparison says about one workload.

    Attributes:
        depth: the smallest depth that no other beats.
        bound: who sets the pace at that depth: the one with more work a step.
        lines: the reasons, in words.
    """

    depth: int
    bound: Bound
    lines: tuple[str, ...]


def verdict(comparison: Comparison, workload: Workload) -> Verdict:
    """Say which depth is best for a workload, and why."""
    found = summaries(comparison, workload)
    best = found[0]
    steps = []
    for summary in found[1:]:
        gain = _gain(comparison, workload, best.depth, summary.depth)
        if gain.is_faster:
            steps.append(
                f"depth {summary.depth} is {gain.ratio:.2f}x depth {best.depth}: {_time(summary.seconds)} against "
                f"{_time(best.seconds)}"
            )
            best = summary
        elif gain.is_slower:
            steps.append(f"depth {summary.depth} is slower than depth {best.depth} ({gain.ratio:.2f}x)")
        else:
            steps.append(f"depth {summary.depth} {gain.what_it_adds} to depth {best.depth} ({gain})")
    # Where the device has more work than the host it is active most of the time, unless the host is late to notice.
    waits_for_host = best.host_step_s > best.device_step_s or best.active_share < 0.5
    bound: Bound = "host-bound" if waits_for_host else "device-bound"
    lines = [_bound_line(best, bound), *(f"{step}." for step in steps)]
    if len(found) > 1:
        lines.append(f"Use depth {best.depth} for this workload.")
        ttft = ", ".join(f"{_time(each.ttft.p50_s or 0.0)} at depth {each.depth}" for each in found)
        lines.append(f"Time to first token, median: {ttft}.")
        if comparison.plan.repeats == 1:
            lines.append("There was one round, so the spread is unknown: --repeats 3 would tell.")
    if preempted := [summary for summary in found if summary.preemptions]:
        lines.append(
            f"The KV cache was too small: up to {max(each.preemptions for each in preempted)} preemptions a run, whose "
            "prompts were computed again."
        )
    lines.append(_floor_line(comparison, workload, best))
    return Verdict(depth=best.depth, bound=bound, lines=tuple(_capital(line) for line in lines))


def tokens_verdict(comparison: Comparison) -> str:
    """Whether all runs gave the same tokens, in words."""
    difference = comparison.difference
    if difference is None:
        runs = len(comparison.runs)
        return f"All {runs} runs gave the same tokens." if runs > 1 else "One run: no tokens to compare."
    if comparison.must_agree:
        return f"FAILED: {difference}, though their steps had the same shapes."
    return (
        f"{difference}. That is no fault by itself: requests ended by EOS or were preempted, so the steps had other "
        "shapes, and another shape may round in another way."
    )


def growth_lines(growth: Growth) -> list[str]:
    """What the table of growth says, in words."""
    lines = [
        f"The KV cache holds {growth.kv_capacity:,} tokens. This device reads "
        f"{growth.read_bytes_per_s / 1e9:,.0f} GB/s (measured); a step's roofline is what it must read, at that rate."
    ]
    bound = [
        f"{cell.requests} x {cell.context:,}"
        for cell in growth.cells
        if cell.device_s is not None and (growth.host_s[cell.requests] or 0.0) > cell.device_s
    ]
    if bound:
        lines.append(f"The host needs longer than the device at requests x context: {', '.join(bound)}.")
    elif any(cell.state == "run" for cell in growth.cells):
        lines.append("The host needs less time than the device everywhere, so from depth 2 on it can be hidden.")
    return lines


def _bound_line(summary: DepthSummary, bound: Bound) -> str:
    causes = [f"{cause} {share:.1%}" for cause, share in list(summary.idle_shares.items())[:2] if share >= 0.001]
    why = f" (idle for: {', '.join(causes)})" if causes else ""
    return (
        f"{bound} at depth {summary.depth}: a step takes the host {summary.host_step_s * 1e3:.2f} ms and the device "
        f"{summary.device_step_s * 1e3:.2f} ms; the device was active {summary.active_share:.2%} of the time{why}."
    )


def _floor_line(comparison: Comparison, workload: Workload, best: DepthSummary) -> str:
    floor_s = comparison.floor_s(workload.name)
    return (
        f"This device needs {_time(floor_s)} to read what the workload must read at least (at "
        f"{comparison.read_bytes_per_s / 1e9:,.0f} GB/s, measured); depth {best.depth} took "
        f"{best.seconds / floor_s:.2f}x that. The {best.num_steps:,} steps that ran need {_time(best.steps_floor_s)}."
    )


def _gain(comparison: Comparison, workload: Workload, before: int, after: int) -> "_Gain":
    pairs = zip(comparison.runs_of(before, workload.name), comparison.runs_of(after, workload.name), strict=True)
    return _Gain(tuple(one.seconds / two.seconds for one, two in pairs))


@dataclass(frozen=True, slots=True)
class _Gain:
    """How much faster a depth is than another, in each round: the two ran one after the other, so they are compared."""

    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_faster(self) -> bool:
        return self.ratio >= 1 + _LEAST_GAIN and min(self.ratios) > 1

    @property
    def is_slower(self) -> bool:
        return self.ratio <= 1 / (1 + _LEAST_GAIN) and max(self.ratios) < 1

    @property
    def what_it_adds(self) -> str:
        return "adds nothing" if abs(self.ratio - 1) < _LEAST_GAIN else "adds nothing that stands out of the noise"

    def __str__(self) -> str:
        if len(self.ratios) == 1:
            return f"{self.ratio:.3f}x"
        return (
            f"{self.ratio:.3f}x, from {min(self.ratios):.3f}x to {max(self.ratios):.3f}x in {len(self.ratios)} rounds"
        )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _capital(line: str) -> str:
    return line[:1].upper() + line[1:]
