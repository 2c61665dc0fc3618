"""The runs of one depth as one line: :class:`DepthSummary`, medians and spread over the rounds. Pure functions."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gapless.bench.comparison import Comparison
from gapless.bench.figures import RunFigures, median_of, percentile
from gapless.bench.workloads import Workload

__all__ = ["DepthSummary", "LatencySummary", "summaries"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencySummary:
    """Percentiles over all requests of all rounds, in seconds; ``None`` where nothing was measured."""

    p50_s: float | None
    p90_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, runs: Sequence[RunFigures], name: str) -> "LatencySummary":
        """Of ``ttft_s``, ``tpot_s``, ``itl_s`` or ``end_to_end_s``."""
        times = [time for run in runs for time in run.times_s(name)]
        return cls(p50_s=percentile(times, 50), p90_s=percentile(times, 90), p99_s=percentile(times, 99))


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthSummary:
    """One depth on one workload. Figures are medians over the rounds where nothing else is said.

    Attributes:
        seconds, fastest_s, slowest_s: of a run.
        step_p50_s, step_p99_s: from one step to the next, over all steps of all rounds.
        active_share: of the device, 0 to 1.
        steps_floor_s: the least time for the bytes of the steps that ran.
        roofline_share: of the steps without prefill: the least time for their bytes over the time they took, gaps
            included; ``None`` if there was none.
        idle_shares: by cause, of the window of the run.
        host_step_s: the engine thread's work on a step, on average.
        device_step_s: the device's, on average.
    """

    depth: int
    num_rounds: int
    seconds: float
    fastest_s: float
    slowest_s: float
    num_steps: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    step_p50_s: float | None
    step_p99_s: float | None
    active_share: float
    device_step_s: float
    steps_floor_s: float
    roofline_share: float | None
    idle_shares: dict[str, float]
    host_step_s: float
    preemptions: int
    ttft: LatencySummary
    tpot: LatencySummary
    itl: LatencySummary
    end_to_end: LatencySummary

    @classmethod
    def of(cls, runs: Sequence[RunFigures], read_bytes_per_s: float) -> "DepthSummary":
        """Sum up the rounds of one depth on a device that reads ``read_bytes_per_s``."""
        seconds = [run.seconds for run in runs]
        periods = [period for run in runs for period in run.steps.periods_s]
        return cls(
            depth=runs[0].depth,
            num_rounds=len(runs),
            seconds=statistics.median(seconds),
            fastest_s=min(seconds),
            slowest_s=max(seconds),
            num_steps=round(statistics.median(run.num_steps for run in runs)),
            output_tokens_per_s=statistics.median(run.output_tokens_per_s for run in runs),
            total_tokens_per_s=statistics.median(
                (run.num_prompt_tokens + run.num_output_tokens) / run.seconds for run in runs
            ),
            step_p50_s=percentile(periods, 50),
            step_p99_s=percentile(periods, 99),
            active_share=statistics.median(run.active_share for run in runs),
            device_step_s=statistics.median(run.busy_s / run.num_steps for run in runs),
            steps_floor_s=statistics.median(run.steps.read_bytes for run in runs) / read_bytes_per_s,
            roofline_share=median_of([_roofline_share(run, read_bytes_per_s) for run in runs]),
            idle_shares=_median_idle(runs),
            host_step_s=statistics.median(run.steps.host_step_s for run in runs),
            preemptions=max(run.preemptions for run in runs),
            ttft=LatencySummary.of(runs, "ttft_s"),
            tpot=LatencySummary.of(runs, "tpot_s"),
            itl=LatencySummary.of(runs, "itl_s"),
            end_to_end=LatencySummary.of(runs, "end_to_end_s"),
        )

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, as a share of the median; 0 for a single one."""
        return (self.slowest_s - self.fastest_s) / self.seconds


def summaries(comparison: Comparison, workload: Workload) -> list[DepthSummary]:
    """One summary for each depth, by rising depth."""
    return [
        DepthSummary.of(comparison.runs_of(depth, workload.name), comparison.read_bytes_per_s)
        for depth in sorted(comparison.plan.depths)
    ]


def _roofline_share(run: RunFigures, read_bytes_per_s: float) -> float | None:
    elapsed_s = run.steps.decode_elapsed_s
    return run.steps.decode_read_bytes / read_bytes_per_s / elapsed_s if elapsed_s else None


def _median_idle(runs: Sequence[RunFigures]) -> dict[str, float]:
    causes = sorted({cause for run in runs for cause in run.steps.idle_s})
    shares = {
        cause: statistics.median(
            run.steps.idle_s.get(cause, 0.0) / run.window_s if run.window_s else 0.0 for run in runs
        )
        for cause in causes
    }
    return dict(sorted(shares.items(), key=lambda item: -item[1]))
