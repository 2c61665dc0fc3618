"""What Prometheus is told: names as documented, and numbers that a table of times gives by hand."""

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gapless import SamplingParams
from gapless.outputs import RequestMetrics
from gapless.server.messages import EngineStats, TimelineStats
from gapless.server.metric_names import METRICS
from gapless.server.metrics import ServerMetrics

DOCUMENT = Path(__file__).parents[3] / "docs" / "server" / "metrics.md"


@dataclass
class News:
    index: int
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass
class Asked:
    num_prompt_tokens: int = 10
    num_cached_tokens: int = 4
    params: SamplingParams = field(default_factory=SamplingParams)
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrived_s=100.0, scheduled_s=100.07))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the metrics see: its last item."""
    now = [100.0]
    monkeypatch.setattr("gapless.server.metrics.time.perf_counter", lambda: now[-1])
    return now


def values(metrics: ServerMetrics) -> dict[str, float]:
    """Samples by name and labels, as a Prometheus server reads them."""
    found = {}
    for family in text_string_to_metric_families(metrics.expose().decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def test_a_generation_is_measured(clock: list[float]) -> None:
    metrics = ServerMetrics()
    with metrics.watch(Asked()) as watch:
        for now_s, news in (
            (100.2, News(0, [1])),
            (100.21, News(0, [2, 3])),
            (100.25, News(0, [])),
            (100.26, News(0, [4], "length")),
        ):
            clock.append(now_s)
            watch.add([news])
    got = values(metrics)
    assert got["gapless_time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert got["gapless_time_to_first_token_seconds_bucket{le=0.1}"] == 0
    assert got["gapless_time_to_first_token_seconds_bucket{le=0.25}"] == 1
    assert got["gapless_inter_token_latency_seconds_count"] == 2, "text without tokens is none"
    assert got["gapless_inter_token_latency_seconds_sum"] == pytest.approx(0.06)
    assert got["gapless_inter_token_latency_seconds_bucket{le=0.01}"] == pytest.approx(1, abs=1)
    assert got["gapless_time_per_output_token_seconds_sum"] == pytest.approx(0.06 / 3)
    assert got["gapless_request_duration_seconds_sum"] == pytest.approx(0.26)
    assert got["gapless_queue_time_seconds_sum"] == pytest.approx(0.07)
    assert got["gapless_request_generation_tokens_sum"] == 4
    assert got["gapless_generation_tokens_total"] == 4
    assert got["gapless_prompt_tokens_total"] == 10
    assert got["gapless_prefix_cache_hit_ratio"] == pytest.approx(0.4)
    assert got["gapless_choices_total{finish_reason=length}"] == 1


def test_choices_are_measured_each_and_the_prompt_once(clock: list[float]) -> None:
    metrics = ServerMetrics()
    with metrics.watch(Asked(params=SamplingParams(n=2))) as watch:
        clock.append(100.1)
        watch.add([News(0, [1]), News(1, [1])])
        clock.append(100.3)
        watch.add([News(0, [2], "stop"), News(1, [2], "length")])
    got = values(metrics)
    assert got["gapless_time_to_first_token_seconds_count"] == 1
    assert got["gapless_inter_token_latency_seconds_count"] == 2
    assert got["gapless_request_prompt_tokens_count"] == 1
    assert got["gapless_choices_total{finish_reason=stop}"] == 1
    assert got["gapless_choices_total{finish_reason=length}"] == 1


def test_a_request_that_runs_can_be_seen(clock: list[float]) -> None:
    metrics = ServerMetrics()
    asked = Asked(num_cached_tokens=0, metrics=RequestMetrics(arrived_s=100.0))
    with metrics.watch(asked) as watch:
        got = values(metrics)
        assert got["gapless_prompt_tokens_total"] == got["gapless_request_prompt_tokens_sum"] == 10
        assert got["gapless_request_prompt_tokens_count"] == 1
        assert got["gapless_queue_time_seconds_count"] == 0, "the engine has not begun with it"
        asked.metrics.scheduled_s, asked.num_cached_tokens = 100.07, 4
        for _ in range(3):
            watch.add([News(0, [1])])
        during = values(metrics)
        assert during["gapless_queue_time_seconds_count"] == 1
        assert during["gapless_queue_time_seconds_sum"] == pytest.approx(0.07)
        assert during["gapless_cached_prompt_tokens_total"] == 4
        assert during["gapless_generation_tokens_total"] == 3
    after = values(metrics)
    for name in ("prompt_tokens_total", "cached_prompt_tokens_total", "queue_time_seconds_count"):
        assert after[f"gapless_{name}"] == during[f"gapless_{name}"], "and it is counted once"


def test_a_request_that_never_began_has_not_waited_for_a_step() -> None:
    metrics = ServerMetrics()
    with metrics.watch(Asked(num_cached_tokens=0, metrics=RequestMetrics(arrived_s=100.0))):
        pass
    got = values(metrics)
    assert got["gapless_prompt_tokens_total"] == 10
    assert got["gapless_queue_time_seconds_count"] == 0
    assert got["gapless_choices_total{finish_reason=abort}"] == 1


def test_whoever_leaves_is_counted_as_aborted(clock: list[float]) -> None:
    metrics = ServerMetrics()
    with suppress(KeyError), metrics.watch(Asked(params=SamplingParams(n=3))) as watch:
        watch.add([News(1, [1], "stop")])
        raise KeyError
    got = values(metrics)
    assert got["gapless_choices_total{finish_reason=abort}"] == 2
    assert got["gapless_request_duration_seconds_count"] == 0


def test_a_bound_belongs_below_it() -> None:
    metrics = ServerMetrics()
    for value in (0.0, 0.005, 0.0050001, 1e9):
        metrics.observe("queue_time_seconds", value)
    got = values(metrics)
    assert got["gapless_queue_time_seconds_bucket{le=0.005}"] == 2
    assert got["gapless_queue_time_seconds_bucket{le=0.01}"] == 3
    assert got["gapless_queue_time_seconds_bucket{le=300.0}"] == 3
    assert got["gapless_queue_time_seconds_bucket{le=+Inf}"] == got["gapless_queue_time_seconds_count"] == 4


def stats(**changes: Any) -> EngineStats:
    timeline = TimelineStats(
        num_steps=9,
        busy_s=6.0,
        window_s=8.0,
        no_work_s=1.0,
        idle_s={"schedule": 1.5, "launch": 0.5},
        decode_steps=4,
        decode_read_bytes=3_000,
        decode_busy_s=2.0,
        decode_elapsed_s=4.0,
        read_bytes_per_s=1_000.0,
    )
    values: dict[str, Any] = {
        **dict.fromkeys(("in_flight_tokens", "num_malformed"), 0),
        "free_blocks": 5,
        "cached_blocks": 2,
        "used_blocks": 3,
        "running": 7,
        "waiting": 8,
        "steps": 9,
        "output_tokens": 10,
        "preemptions": 11,
        "aborted": 12,
        "device_busy_s": 6.0,
        "device_window_s": 8.0,
        "timeline": timeline,
    }
    return EngineStats(**{**values, **changes})


def test_the_engines_counts_are_shown_and_stay_when_it_dies() -> None:
    metrics = ServerMetrics()
    assert values(metrics)["gapless_requests_running"] == 0
    metrics.set_engine(stats())
    metrics.set_engine(None)
    got = values(metrics)
    assert got["gapless_engine_up"] == 0
    assert got["gapless_requests_running"] == 7
    assert got["gapless_requests_waiting"] == 8
    assert got["gapless_kv_cache_usage_ratio"] == pytest.approx(0.3)
    assert got["gapless_kv_cache_blocks{state=cached}"] == 2
    assert got["gapless_preemptions_total"] == 11
    assert got["gapless_aborted_total"] == 12
    assert got["gapless_device_active_ratio"] == pytest.approx(0.75)
    assert got["gapless_device_idle_seconds_total{cause=schedule}"] == 1.5
    assert got["gapless_device_idle_seconds_total{cause=launch}"] == 0.5
    assert got["gapless_roofline_share"] == pytest.approx(3 / 4)


def test_without_a_timeline_the_rest_is_shown() -> None:
    metrics = ServerMetrics()
    metrics.set_engine(stats(timeline=None, device_window_s=0.0))
    got = values(metrics)
    assert got["gapless_steps_total"] == 9
    assert got["gapless_roofline_share"] == 0
    assert not [name for name in got if "idle_seconds" in name]


def test_docs_and_exposition_have_the_same_names() -> None:
    documented = re.findall(r"^\| `(gapless_\w+)` \| (\w+) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    metrics = ServerMetrics("name")
    metrics.set_engine(stats())
    for info in METRICS:
        if info.kind == "counter" and info.labels:
            metrics.count(info.name, *("label" for _ in info.labels))
    exposed = []
    for family in text_string_to_metric_families(metrics.expose().decode()):
        if family.name.startswith("gapless_api_process"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        exposed.append((name, family.type))
        assert family.samples, f"{name} has no value"
    assert exposed == documented


def test_labels_are_escaped_and_a_wrong_number_of_them_is_a_mistake() -> None:
    metrics = ServerMetrics('a"b\\c\nd')
    assert r'model="a\"b\\c\nd"' in metrics.expose().decode()
    with pytest.raises(AssertionError):
        metrics.count("http_requests_total", "route")


def test_followed_values_are_read_when_metrics_are_exposed() -> None:
    metrics = ServerMetrics()
    held = [1.0]
    metrics.follow("http_requests_in_progress", lambda: held[0])
    metrics.follow("log_lines_dropped_total", lambda: held[0] + 1)
    held[0] = 5.0
    got = values(metrics)
    assert got["gapless_http_requests_in_progress"] == 5
    assert got["gapless_log_lines_dropped_total"] == 6
