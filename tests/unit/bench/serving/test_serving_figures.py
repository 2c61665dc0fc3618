"""What is made of records whose times are known, and how it is shown."""

import pytest
from rich.console import Console

from gapless.bench.serving.arrivals import LoadLevel
from gapless.bench.serving.figures import LatencyTargets, LevelFigures, level_figures
from gapless.bench.serving.load import LevelRun
from gapless.bench.serving.sending import RequestRecord
from gapless.bench.serving.table import remarks, serving_table
from gapless.errors import ConfigError


def record(
    *, due: float = 0.0, late: float = 0.0, first: float = 0.1, gaps: tuple[float, ...] = (), failure: str | None = None
) -> RequestRecord:
    """A request whose first text came ``first`` seconds after it was due, and the others ``gaps`` apart."""
    times = [due + first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return RequestRecord(
        scheduled_s=due,
        sent_s=due + late,
        text_s=tuple(times),
        ended_s=times[-1] + 0.05,
        prompt_tokens=10,
        output_tokens=len(times),
        failure=failure,
        detail="why" if failure else "",
    )


def figures(records: list[RequestRecord], targets: LatencyTargets | None = None, seconds: float = 10.0) -> LevelFigures:
    level = LoadLevel(kind="rate", value=2.0)
    run = LevelRun(level=level, records=tuple(records), seconds=seconds, client_busy=0.25)
    return level_figures(run, targets or LatencyTargets())


def test_latencies_are_percentiles_by_nearest_rank() -> None:
    found = figures([record(first=ms / 1e3, gaps=(0.010, 0.030)) for ms in range(1, 101)])
    assert found.ttft.p50_s == pytest.approx(0.050)
    assert found.ttft.p90_s == pytest.approx(0.090)
    assert found.ttft.p99_s == pytest.approx(0.099)
    assert found.ttft.mean_s == pytest.approx(0.0505)
    assert found.tpot.p50_s == pytest.approx(0.020)
    assert found.itl.p50_s == pytest.approx(0.010)
    assert found.itl.p90_s == pytest.approx(0.030)
    assert found.end_to_end.p50_s == pytest.approx(0.050 + 0.040 + 0.050)


def test_rates_count_complete_requests_only() -> None:
    gaps = (0.01,) * 4
    records = [record(gaps=gaps), record(gaps=gaps), record(gaps=gaps, failure="HTTP 500")]
    found = figures(records, seconds=2.0)
    assert (found.requests, found.completed) == (3, 2)
    assert found.requests_per_s == 1.0
    assert found.output_tokens_per_s == 5.0
    assert found.total_tokens_per_s == 15.0
    assert found.failures == {"HTTP 500": 1}
    assert found.first_failure == "why"
    assert found.good_requests_per_s is None


def test_waiting_for_the_client_counts_as_latency() -> None:
    found = figures([record(due=5.0, late=0.4, first=0.5)])
    assert found.ttft.p50_s == pytest.approx(0.5)
    assert found.lateness_p99_s == pytest.approx(0.4)
    assert found.mean_in_flight == pytest.approx((0.55 - 0.4) / 10.0)


def test_goodput_counts_requests_within_both_targets() -> None:
    good, slow_start, slow_tokens = record(first=0.1), record(first=0.3), record(gaps=(0.01, 0.2))
    failed = record(failure="timeout")
    found = figures([good, good, slow_start, slow_tokens, failed], LatencyTargets(ttft_s=0.2, itl_s=0.1), seconds=4.0)
    assert found.good_requests_per_s == 0.5
    assert found.good_share == pytest.approx(2 / 5)
    assert figures([slow_start], LatencyTargets(itl_s=0.1)).good_share == 1.0
    assert figures([slow_tokens], LatencyTargets(ttft_s=0.2)).good_share == 1.0


def test_one_slow_token_in_a_hundred_is_forgiven_and_two_are_not() -> None:
    targets = LatencyTargets(itl_s=0.02)
    assert targets.are_met_by(record(gaps=(0.5, *(0.01,) * 99)))
    assert not targets.are_met_by(record(gaps=(0.5, 0.5, *(0.01,) * 98)))
    assert targets.are_met_by(record(gaps=())), "a single token has no time between tokens"


def test_a_request_without_text_misses_its_first_token() -> None:
    empty = RequestRecord(scheduled_s=0.0, sent_s=0.0, text_s=(), ended_s=1.0)
    assert not LatencyTargets(ttft_s=5.0).are_met_by(empty)


@pytest.mark.parametrize("given", [{"ttft_s": 0.0}, {"itl_s": -1.0}])
def test_targets_are_positive(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"slo="):
        LatencyTargets(**given)


def test_nothing_complete_is_shown_as_nothing() -> None:
    found = figures([record(failure="HTTP 500"), record(failure="timeout"), record(failure="HTTP 500")])
    assert list(found.failures.items()) == [("HTTP 500", 2), ("timeout", 1)]
    assert found.ttft.p50_s is None
    text = shown([found])
    assert "0/3" in text
    lines = remarks([found])
    assert "2/s: 2 of 3 failed: HTTP 500" in lines
    assert "2/s: the first of them: why" in lines


def test_the_table_has_goodput_when_there_is_a_target() -> None:
    records = [record(first=0.1, gaps=(0.01,)), record(first=0.9, gaps=(0.01,))]
    assert "goodput" not in shown([figures(records)])
    text = shown([figures(records, LatencyTargets(ttft_s=0.5), seconds=2.0)])
    assert "0.50/s (50%)" in text
    assert "100.0 / 900.0 / 900.0" in text


def test_a_client_that_was_too_slow_says_so() -> None:
    assert remarks([figures([record()])]) == []
    [late] = remarks([figures([record(late=0.2)])])
    assert "sent up to 200 ms late" in late
    level = LoadLevel(kind="concurrency", value=8)
    busy = LevelRun(level=level, records=(record(),), seconds=1.0, client_busy=0.97)
    [line] = remarks([level_figures(busy, LatencyTargets())])
    assert line.startswith("8: this client computed 97% of the time")


def shown(levels: list[LevelFigures]) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        console.print(serving_table(levels))
    return capture.get()
