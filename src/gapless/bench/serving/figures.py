"""What a level of load came to: :class:`LevelFigures`, made of its records. Pure functions; times are seconds.

*Goodput* (as DistServe uses the word, arXiv 2401.09670) counts only requests that met their latency targets, so that a
server cannot buy throughput with waiting. A request meets its target for inter-token latency if no more than one in a
hundred of its inter-token times is above it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gapless.bench.figures import percentile
from gapless.bench.serving.load import LevelRun
from gapless.bench.serving.sending import RequestRecord
from gapless.errors import ConfigError

__all__ = ["Latency", "LatencyTargets", "LevelFigures", "level_figures"]

_ITL_PERCENT = 99


@dataclass(frozen=True, kw_only=True, slots=True)
class LatencyTargets:
    """What a request must meet to count as good, in seconds; ``None`` asks nothing.

    Raises:
        ConfigError: a target that is not positive.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft-slo", self.ttft_s), ("itl-slo", self.itl_s)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} must be a positive time")

    @property
    def is_set(self) -> bool:
        """Whether there is any target."""
        return self.ttft_s is not None or self.itl_s is not None

    def are_met_by(self, record: RequestRecord) -> bool:
        """Whether a request is complete and within the targets."""
        if not record.is_complete:
            return False
        if self.ttft_s is not None and (record.ttft_s is None or record.ttft_s > self.ttft_s):
            return False
        slowest_s = percentile(record.itl_s, _ITL_PERCENT)
        return self.itl_s is None or slowest_s is None or slowest_s <= self.itl_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Latency:
    """A kind of latency over all complete requests, in seconds; percentiles by nearest rank. ``None``: no value."""

    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p95_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Latency":
        """Of these values; those that are ``None`` do not count."""
        known = [value for value in values if value is not None]
        return cls(
            mean_s=sum(known) / len(known) if known else None,
            p50_s=percentile(known, 50),
            p90_s=percentile(known, 90),
            p95_s=percentile(known, 95),
            p99_s=percentile(known, 99),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelFigures:
    """One level.

    Attributes:
        level: its name; ``kind`` and ``value`` as in :class:`LoadLevel`.
        seconds: from the first request's time to the last one's end.
        requests, completed: sent, and fully answered.
        failures: how many failed, by kind.
        first_failure: the first failure in the server's or the system's own words; empty if there was none.
        requests_per_s, output_tokens_per_s, total_tokens_per_s: of complete requests; the last with their prompts.
        ttft, tpot, itl, end_to_end: latencies. Those to the first text and to the end count from when the request was
            due.
        good_requests_per_s: complete requests within the targets, a second; ``None`` without targets.
        good_share: their share of all requests, 0 to 1.
        mean_in_flight: requests under way, on average.
        lateness_p99_s: how late the client sent requests, the 99th percentile.
        client_busy: share of the time in which the client computed, 0 to 1.
    """

    level: str
    kind: str
    value: float
    seconds: float
    requests: int
    completed: int
    failures: dict[str, int]
    first_failure: str
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Latency
    tpot: Latency
    itl: Latency
    end_to_end: Latency
    good_requests_per_s: float | None
    good_share: float | None
    mean_in_flight: float
    lateness_p99_s: float | None
    client_busy: float


def level_figures(run: LevelRun, targets: LatencyTargets) -> LevelFigures:
    """Everything about one level."""
    complete = [record for record in run.records if record.is_complete]
    good = sum(map(targets.are_met_by, run.records)) if targets.is_set else None
    prompt_tokens = sum(record.prompt_tokens or 0 for record in complete)
    output_tokens = sum(record.output_tokens for record in complete)
    return LevelFigures(
        level=run.level.name,
        kind=run.level.kind,
        value=run.level.value,
        seconds=run.seconds,
        requests=len(run.records),
        completed=len(complete),
        failures=_failures(run.records),
        first_failure=next((record.detail for record in run.records if not record.is_complete), ""),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(complete) / run.seconds,
        output_tokens_per_s=output_tokens / run.seconds,
        total_tokens_per_s=(prompt_tokens + output_tokens) / run.seconds,
        ttft=Latency.of(record.ttft_s for record in complete),
        tpot=Latency.of(record.tpot_s for record in complete),
        itl=Latency.of(time_s for record in complete for time_s in record.itl_s),
        end_to_end=Latency.of(record.end_to_end_s for record in complete),
        good_requests_per_s=None if good is None else good / run.seconds,
        good_share=None if good is None else good / len(run.records),
        mean_in_flight=sum(record.ended_s - record.sent_s for record in run.records) / run.seconds,
        lateness_p99_s=percentile([record.sent_s - record.scheduled_s for record in run.records], 99),
        client_busy=run.client_busy,
    )


def _failures(records: Sequence[RequestRecord]) -> dict[str, int]:
    """How many failed, by kind, the most frequent first."""
    return dict(Counter(record.failure for record in records if record.failure is not None).most_common())
