"""What a run gave, as numbers: :class:`RunFigures` of one run, and :func:`percentile` for all of them.

Immutable values, made by the thread that runs the benchmark. Times are seconds throughout; tables make milliseconds.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RequestFigures", "RunFigures", "StepFigures", "median_of", "percentile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFigures:
    """How one request was served, as its caller saw it.

    Attributes:
        num_prompt_tokens, num_tokens: of its prompt and its output.
        ttft_s: from queueing to the host's knowledge of the first token.
        tpot_s: mean time per token after the first; ``None`` for a single token.
        end_to_end_s: from queueing to its end.
        itl_s: the time between neighbouring tokens; empty unless the request was streamed.
        ended_by_length: whether it ended by its number of tokens.
    """

    num_prompt_tokens: int
    num_tokens: int
    ttft_s: float
    tpot_s: float | None
    end_to_end_s: float
    itl_s: tuple[float, ...]
    ended_by_length: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """What the timeline has about the steps of one run.

    Attributes:
        periods_s: from one step's return to the next one's, as the host saw it.
        host_s: the engine thread's time, by phase, summed over the steps.
        decode_host_s: the median over the steps without prefill of the engine thread's work on a step; ``None`` if
            there was none.
        idle_s: the device's idle time by cause.
        read_bytes: what these steps must read: weights and the KV of every context.
        decode_steps, decode_read_bytes, decode_elapsed_s: of the steps without prefill: how many, what they must read,
            and the time they took with the gaps before them.
        num_steps: how many of the run's steps the recorder still held.
    """

    periods_s: tuple[float, ...]
    host_s: dict[str, float]
    decode_host_s: float | None
    idle_s: dict[str, float]
    read_bytes: int
    decode_steps: int
    decode_read_bytes: int
    decode_elapsed_s: float
    num_steps: int

    @property
    def host_step_s(self) -> float:
        """The engine thread's mean time for a step, waiting not counted."""
        return sum(seconds for phase, seconds in self.host_s.items() if phase != "wait") / max(self.num_steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFigures:
    """One timed run.

    Attributes:
        depth, repeat, workload: which run it was.
        seconds: from queueing all requests to the end of the last one.
        num_steps: steps that were scheduled.
        busy_s, window_s: the device's busy time, and the time it is a part of.
        preemptions: requests that lost their blocks for want of memory.
        steps_digest: of the shapes of all steps, in order: equal digests are equal shapes.
        requests: in the order of the workload.
        token_ids: what each request gave.
        steps: from the timeline.
        start_s: how long building the engine took, weights and, on CUDA, all graphs included.
    """

    depth: int
    repeat: int
    workload: str
    seconds: float
    num_steps: int
    busy_s: float
    window_s: float
    preemptions: int
    steps_digest: str
    requests: tuple[RequestFigures, ...]
    token_ids: tuple[tuple[int, ...], ...]
    steps: StepFigures
    start_s: float

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_output_tokens / self.seconds

    @property
    def active_share(self) -> float:
        """Device-active share, 0 to 1."""
        return self.busy_s / self.window_s if self.window_s else 0.0

    @property
    def has_fixed_steps(self) -> bool:
        """Whether its steps follow from the workload alone: nothing ended by surprise, nothing was preempted."""
        return not self.preemptions and all(request.ended_by_length for request in self.requests)

    def times_s(self, name: str) -> list[float]:
        """All values of ``ttft_s``, ``tpot_s``, ``itl_s`` or ``end_to_end_s``, of all requests."""
        if name == "itl_s":
            return [time for request in self.requests for time in request.itl_s]
        found = [getattr(request, name) for request in self.requests]
        return [time for time in found if time is not None]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least ``percent`` of all do not exceed (nearest rank); ``None`` for no values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def median_of(values: Sequence[float | None]) -> float | None:
    """The median of those that are there; ``None`` if none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
