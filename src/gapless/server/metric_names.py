"""The server's metrics by name: :data:`METRICS`, from which the exposition and ``docs/server/metrics.md`` are made.

Values are in :mod:`gapless.server.metrics`. Constants.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["METRICS", "MetricInfo"]

_LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS: Final = tuple(float(1 << power) for power in range(18))


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricInfo:
    """A metric by its name without ``gapless_``; ``unit`` is that of a gauge or a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = field(default=(), repr=False)


def _histogram(name: str, bounds: tuple[float, ...], text: str) -> MetricInfo:
    return MetricInfo(name=name, kind="histogram", text=text, bounds=bounds)


METRICS: Final = (
    _histogram("time_to_first_token_seconds", _LATENCY_S, "From the hand-over to the engine to the first token."),
    _histogram("time_per_output_token_seconds", _TOKEN_S, "Mean time per token after the first, of a choice."),
    _histogram("inter_token_latency_seconds", _TOKEN_S, "Between two deltas of one choice."),
    _histogram("queue_time_seconds", _LATENCY_S, "From arrival in the engine to the first step with the request."),
    _histogram("request_duration_seconds", _LATENCY_S, "From the hand-over to the engine to the last token of all."),
    _histogram("request_prompt_tokens", _TOKENS, "Prompt tokens of a request."),
    _histogram("request_generation_tokens", _TOKENS, "Tokens of a choice."),
    MetricInfo(name="prompt_tokens_total", kind="counter", text="Prompt tokens of accepted requests."),
    MetricInfo(name="cached_prompt_tokens_total", kind="counter", text="Those of them found in the prefix cache."),
    MetricInfo(name="prefix_cache_hit_ratio", kind="gauge", text="Their ratio over the server's life, 0 to 1."),
    MetricInfo(name="generation_tokens_total", kind="counter", text="Tokens that clients were given."),
    MetricInfo(
        name="choices_total",
        kind="counter",
        text="Ended choices, by how: stop, length, abort (the client left, or was cut off) or error.",
        labels=("finish_reason",),
    ),
    MetricInfo(
        name="http_requests_total",
        kind="counter",
        text="Answered requests by route (its template, or unmatched), method and status.",
        labels=("route", "method", "status"),
    ),
    MetricInfo(
        name="http_refusals_total",
        kind="counter",
        text="Requests that were refused before they reached a route, by reason.",
        labels=("reason",),
    ),
    MetricInfo(name="http_requests_in_progress", kind="gauge", text="POST requests being worked on."),
    MetricInfo(name="http_connections", kind="gauge", text="Open connections."),
    MetricInfo(name="http_held_body_bytes", kind="gauge", text="Bytes of bodies of the requests being answered."),
    MetricInfo(name="draining", kind="gauge", text="1 after SIGTERM, else 0."),
    MetricInfo(name="log_lines_dropped_total", kind="counter", text="Log lines lost: the log's reader is too slow."),
    MetricInfo(name="engine_up", kind="gauge", text="1 while the engine lives; the figures below are its last ones."),
    MetricInfo(name="requests_running", kind="gauge", text="Choices that have a row on the device."),
    MetricInfo(name="requests_waiting", kind="gauge", text="Choices that wait for one."),
    MetricInfo(name="kv_cache_usage_ratio", kind="gauge", text="Share of KV blocks in use, 0 to 1."),
    MetricInfo(name="kv_cache_blocks", kind="gauge", text="KV blocks by state.", labels=("state",)),
    MetricInfo(name="preemptions_total", kind="counter", text="Choices that had to give up their place for a while."),
    MetricInfo(name="steps_total", kind="counter", text="Steps that have come back."),
    MetricInfo(name="engine_tokens_total", kind="counter", text="Tokens sampled, those that nobody got included."),
    MetricInfo(
        name="aborted_total",
        kind="counter",
        text="Choices that ended early in the engine: the client left, was cut off, or got its stop string.",
    ),
    MetricInfo(name="device_busy_seconds_total", kind="counter", text="Time that the device computed."),
    MetricInfo(name="device_window_seconds_total", kind="counter", text="Time in which it had something to do."),
    MetricInfo(name="device_active_ratio", kind="gauge", text="Their ratio over the server's life, 0 to 1."),
    MetricInfo(
        name="device_idle_seconds_total",
        kind="counter",
        text="Time that the device stood still although there was work, by what it waited for.",
        labels=("cause",),
    ),
    MetricInfo(
        name="decode_read_bytes_total",
        kind="counter",
        text="Bytes of weights and KV that decode steps had to read at least.",
    ),
    MetricInfo(name="decode_seconds_total", kind="counter", text="Time that decode steps took, gaps included."),
    MetricInfo(
        name="roofline_share",
        kind="gauge",
        text="Least time to read those bytes over the time taken, 0 to 1; 0 where the device's speed is unknown.",
    ),
    MetricInfo(name="info", kind="gauge", text="1; its labels say what runs.", labels=("version", "model")),
)
"""Every metric, in the order of the page."""
