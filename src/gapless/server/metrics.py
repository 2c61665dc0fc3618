"""What Prometheus sees: :class:`ServerMetrics`, and :class:`GenerationWatch`, which measures one generation.

Latencies are those of the API process: from when a request was handed to the engine to when its text was ready to be
sent. What is known early is counted early, so that a stream shows while it runs. A
histogram here is a list of counts and one bisection, since the time between tokens is observed for each delta of each
stream; the event loop's thread alone writes, so nothing is locked. The registry is this object's own, nothing is
global. Names and meanings stand in :mod:`gapless.server.metric_names`.
"""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import gapless
from gapless.outputs import RequestMetrics
from gapless.sampling_params import SamplingParams
from gapless.server.messages import EngineStats
from gapless.server.metric_names import METRICS, MetricInfo

__all__ = ["GenerationWatch", "ServerMetrics"]

_Key: TypeAlias = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""


_BY_NAME: Final = {metric.name: metric for metric in METRICS}


class Delta(Protocol):
    """What a watch reads of a choice's news."""

    @property
    def index(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...


class WatchedGeneration(Protocol):
    """What a watch reads of a generation."""

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def metrics(self) -> RequestMetrics: ...


class _Histogram:
    """Counts by bucket. A value equal to a bound belongs below it, as Prometheus has it."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, info: MetricInfo) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return HistogramMetricFamily(f"gapless_{info.name}", info.text, buckets=buckets, sum_value=self._sum)


class GenerationWatch:
    """Times one generation; made by :meth:`ServerMetrics.watch`, used as a context manager in the event loop.

    A choice that has not ended when the block is left was aborted.
    """

    __slots__ = ("_first_s", "_generation", "_has_begun", "_last_s", "_metrics", "_num_ended", "_num_tokens")

    def __init__(self, metrics: "ServerMetrics", generation: WatchedGeneration) -> None:
        self._metrics = metrics
        self._generation = generation
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._num_ended = 0
        self._has_begun = False

    def __enter__(self) -> Self:
        num_tokens = self._generation.num_prompt_tokens
        self._metrics.count("prompt_tokens_total", amount=num_tokens)
        self._metrics.observe("request_prompt_tokens", num_tokens)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin()
        if (lost := self._generation.params.n - self._num_ended) > 0:
            self._metrics.count("choices_total", "abort", amount=lost)
        elif self._last_s:
            took_s = max(self._last_s.values()) - self._generation.metrics.arrived_s
            self._metrics.observe("request_duration_seconds", took_s)

    def _begin(self) -> None:
        """Count what is known once the engine has begun with the prompt, which may be told with the first tokens."""
        queue_s = self._generation.metrics.queue_s
        if self._has_begun or queue_s is None:
            return
        self._has_begun = True
        self._metrics.observe("queue_time_seconds", queue_s)
        self._metrics.count("cached_prompt_tokens_total", amount=self._generation.num_cached_tokens)

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take the news that the generation gave just now."""
        self._begin()
        now_s = time.perf_counter()
        for delta in deltas:
            if num := len(delta.token_ids):
                self._tokens(delta.index, num, now_s)
            if delta.finish_reason is not None:
                self._ended(delta.index, delta.finish_reason)

    def _tokens(self, index: int, num: int, now_s: float) -> None:
        metrics = self._metrics
        last_s = self._last_s.get(index)
        if last_s is None:
            if not self._first_s:
                metrics.observe("time_to_first_token_seconds", now_s - self._generation.metrics.arrived_s)
            self._first_s[index] = now_s
            self._num_tokens[index] = num
        else:
            metrics.inter_token.observe(now_s - last_s)
            self._num_tokens[index] += num
        self._last_s[index] = now_s
        metrics.num_generated += num

    def _ended(self, index: int, reason: str) -> None:
        self._num_ended += 1
        self._metrics.count("choices_total", reason)
        num = self._num_tokens.get(index, 0)
        self._metrics.observe("request_generation_tokens", num)
        if num > 1:
            spent_s = self._last_s[index] - self._first_s[index]
            self._metrics.observe("time_per_output_token_seconds", spent_s / (num - 1))


class ServerMetrics(Collector):
    """All figures of one server. The event loop's thread writes and exposes them.

    Args:
        model_name: shown in ``gapless_info``.
    """

    def __init__(self, model_name: str = "") -> None:
        self._model_name = model_name
        self._histograms = {info.name: _Histogram(info.bounds) for info in METRICS if info.kind == "histogram"}
        self._counts: defaultdict[_Key, float] = defaultdict(float)
        self._gauges: dict[_Key, float] = {}
        self._followed: dict[str, Callable[[], float]] = {}
        self._engine: EngineStats | None = None
        self.inter_token = self._histograms["inter_token_latency_seconds"]
        self.num_generated = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(namespace="gapless_api", registry=self._registry)

    def watch(self, generation: WatchedGeneration) -> GenerationWatch:
        """Measure a generation."""
        return GenerationWatch(self, generation)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram of :data:`METRICS`."""
        self._histograms[name].observe(value)

    def count(self, name: str, *labels: str, amount: float = 1) -> None:
        """Add to a counter of :data:`METRICS`; a label for each that it has."""
        assert len(labels) == len(_BY_NAME[name].labels)
        self._counts[name, labels] += amount

    def set_gauge(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of :data:`METRICS`."""
        assert len(labels) == len(_BY_NAME[name].labels)
        self._gauges[name, labels] = value

    def follow(self, name: str, read: Callable[[], float]) -> None:
        """Ask ``read`` for the value of a metric without labels whenever metrics are exposed."""
        self._followed[name] = read

    def set_engine(self, figures: EngineStats | None) -> None:
        """Take over the engine's counts; ``None`` says that it has died and leaves the last ones."""
        self.set_gauge("engine_up", 0.0 if figures is None else 1.0)
        if figures is not None:
            self._engine = figures

    def expose(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """For the registry: each metric of :data:`METRICS`, also those that nothing has happened to."""
        counts, gauges = self._current()
        for info in METRICS:
            if info.kind == "histogram":
                yield self._histograms[info.name].family(info)
            elif info.kind == "counter":
                counter = CounterMetricFamily(f"gapless_{info.name}", info.text, labels=info.labels)
                for labels, value in _samples(counts, info):
                    counter.add_metric(labels, value)
                yield counter
            else:
                gauge = GaugeMetricFamily(f"gapless_{info.name}", info.text, labels=info.labels)
                for labels, value in _samples(gauges, info):
                    gauge.add_metric(labels, value)
                yield gauge

    def _current(self) -> tuple[dict[_Key, float], dict[_Key, float]]:
        """Counters and gauges by name and labels."""
        counts: dict[_Key, float] = dict(self._counts)
        gauges = dict(self._gauges)
        counts["generation_tokens_total", ()] = self.num_generated
        for name, read in self._followed.items():
            (counts if _BY_NAME[name].kind == "counter" else gauges)[name, ()] = read()
        if prompt_tokens := counts.get(("prompt_tokens_total", ())):
            cached = counts.get(("cached_prompt_tokens_total", ()), 0.0)
            gauges["prefix_cache_hit_ratio", ()] = cached / prompt_tokens
        gauges["info", (gapless.__version__, self._model_name)] = 1.0
        if self._engine is not None:
            _add_engine(self._engine, counts, gauges)
        return counts, gauges


def _add_engine(engine: EngineStats, counts: dict[_Key, float], gauges: dict[_Key, float]) -> None:
    total = engine.free_blocks + engine.cached_blocks + engine.used_blocks
    counts |= {
        ("preemptions_total", ()): engine.preemptions,
        ("steps_total", ()): engine.steps,
        ("engine_tokens_total", ()): engine.output_tokens,
        ("aborted_total", ()): engine.aborted,
        ("device_busy_seconds_total", ()): engine.device_busy_s,
        ("device_window_seconds_total", ()): engine.device_window_s,
    }
    gauges |= {
        ("requests_running", ()): engine.running,
        ("requests_waiting", ()): engine.waiting,
        ("kv_cache_usage_ratio", ()): engine.used_blocks / total if total else 0.0,
        ("kv_cache_blocks", ("free",)): engine.free_blocks,
        ("kv_cache_blocks", ("cached",)): engine.cached_blocks,
        ("kv_cache_blocks", ("used",)): engine.used_blocks,
    }
    if engine.device_window_s > 0:
        gauges["device_active_ratio", ()] = engine.device_busy_s / engine.device_window_s
    if (timeline := engine.timeline) is None:
        return
    for cause, idle_s in timeline.idle_s.items():
        counts["device_idle_seconds_total", (cause,)] = idle_s
    counts["decode_read_bytes_total", ()] = timeline.decode_read_bytes
    counts["decode_seconds_total", ()] = timeline.decode_elapsed_s
    if timeline.read_bytes_per_s and timeline.decode_elapsed_s > 0:
        floor_s = timeline.decode_read_bytes / timeline.read_bytes_per_s
        gauges["roofline_share", ()] = floor_s / timeline.decode_elapsed_s


def _samples(values: Mapping[_Key, float], info: MetricInfo) -> Iterator[tuple[tuple[str, ...], float]]:
    """Labels and values of a metric; one without labels starts at 0."""
    found = [(labels, value) for (name, labels), value in values.items() if name == info.name]
    if not found and not info.labels:
        found = [((), 0.0)]
    return iter(found)
