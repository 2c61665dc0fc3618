"""What a caller gets back: :class:`RequestOutput` with one :class:`CompletionOutput` for each choice."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

__all__ = ["CompletionOutput", "FinishReason", "Logprob", "RequestMetrics", "RequestOutput", "TokenLogprobsById"]

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(kw_only=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of ``time.perf_counter()``.

    ``scheduled_s`` is when its first step was planned.
    ``first_token_s`` and ``finished_s`` are taken when the host has collected the step, so they hold what a caller
    sees and not what the device did.
    """

    arrived_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0

    @property
    def queue_s(self) -> float | None:
        """Time from arrival until the first step that it is part of was planned, in seconds."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, in seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    def tpot_s(self, num_tokens: int) -> float | None:
        """Mean time per output token after the first, in seconds, for an output of ``num_tokens``."""
        if self.first_token_s is None or self.finished_s is None or num_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (num_tokens - 1)


@dataclass(slots=True)
class Logprob:
    """How likely a token was, under the model's raw logits.

    Attributes:
        logprob: natural logarithm of the probability; an impossible token has -9999.0.
        rank: its place among all tokens, from 1.
        decoded_token: its text alone.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobsById: TypeAlias = dict[int, Logprob]
"""Log-probs at one place, by token id: the token that stands there first, then the most likely ones."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One generated continuation.

    Attributes:
        index: which of the request's choices this is.
        text: the decoded text; empty when the request asked for no text.
        token_ids: every sampled token, EOS or stop token included; with the end by a stop string, up to the token that
            completes the string.
        finish_reason: ``None`` while it runs.
        stop_reason: the string in ``stop``, or the id in ``stop_token_ids``, that ended it, if one did.
        logprobs: one mapping for each of ``token_ids``, if ``SamplingParams.logprobs`` asked for them.
        cumulative_logprob: the sum of the sampled tokens' log-probs, if they were asked for.
        error: what went wrong, when ``finish_reason`` is ``"error"``.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobsById] | None = None
    cumulative_logprob: float | None = None
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """The state of a request: final from :class:`gapless.LLM`, growing from :class:`gapless.AsyncLLM`.

    Attributes:
        prompt_logprobs: one mapping for each prompt token, ``None`` for the first one, if
            ``SamplingParams.prompt_logprobs`` asked for them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[TokenLogprobsById | None] | None = None
