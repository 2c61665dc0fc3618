"""One generation and its state: :class:`Request`. Only the engine loop mutates it.

Life cycle::

    WAITING --admit--> RUNNING --last step enqueued--> RETIRING --collected--> FINISHED
       ^                  |
       +----- preempt ----+            (an EOS, an abort or an error finishes it from any state)
"""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gapless.engine.logprobs import FullLogprobs, TokenLogprobs
from gapless.engine.prefix_cache import CachedPrefix
from gapless.engine.stop_check import StopCheck
from gapless.engine.wide_rows import WideOptions
from gapless.outputs import FinishReason, RequestMetrics
from gapless.pipeline.batch import Int32Array
from gapless.sampling_params import SamplingParams

__all__ = ["EngineRequest", "Request", "RequestState", "choice_seed"]

_UNLIMITED = 2**62


class RequestState(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    RETIRING = "retiring"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """What a caller hands to the engine.

    Args:
        prompt_token_ids: at least one id, all inside the vocabulary.
        params: how to sample.
        stop_token_ids: ids that end it: EOS (unless ignored) and those of ``params``.
        streams: whether every step's tokens are published, or only the end.
        bad_words: those of ``params`` as token ids.
        salt: becomes part of every prefix-cache key; requests share blocks only under equal salts.
        make_stop_check: makes the judge of a choice's text, for a request with stop strings.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    streams: bool = False
    bad_words: Sequence[Sequence[int]] = ()
    salt: bytes = b""
    make_stop_check: Callable[[], StopCheck] | None = None


class Request:
    """A request inside the engine; of a request for ``n`` choices, one of them.

    ``length = prompt + output + in flight``; ``num_computed_tokens`` counts positions whose KV is enqueued.

    Choices are requests of their own, which share the blocks of their prompt. The first *leads* the others: they
    follow into the queue when its prompt is enqueued, so that they find the blocks.

    Attributes:
        leader: whom it follows; ``None`` as soon as it is queued itself.
        followers: those who wait for its prompt.
        num_cacheable_tokens: only blocks of this many first tokens are shared.
        logprobs: one for each output token, if they were asked for.
        prompt_logprobs: one for each prompt token, if they were asked for, as far as they have arrived.
        num_rated_tokens: prompt tokens that need no (further) log-prob, since it is enqueued or not wanted.
        num_unsettled: the latest output tokens that a stop string may still cut off.
    """

    __slots__ = (
        "blocks",
        "error",
        "finish_reason",
        "followers",
        "id",
        "in_flight",
        "leader",
        "logprobs",
        "max_tokens",
        "metrics",
        "num_cacheable_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published",
        "num_rated_tokens",
        "num_unsettled",
        "output",
        "params",
        "prefix",
        "prompt",
        "prompt_logprobs",
        "residency",
        "row",
        "salt",
        "seed",
        "state",
        "step",
        "stop_check",
        "stop_reason",
        "stop_token_ids",
        "streams",
        "wide",
        "wide_row",
    )

    def __init__(
        self,
        request_id: int,
        source: EngineRequest,
        *,
        prompt: Int32Array,
        max_tokens: int,
        seed: int,
        stop_check: StopCheck | None,
        arrived_s: float,
    ) -> None:
        self.id = request_id
        self.params = source.params
        self.prompt = prompt
        self.num_prompt_tokens = len(self.prompt)
        self.max_tokens = max_tokens
        self.stop_token_ids = source.stop_token_ids
        self.streams = source.streams
        self.salt = source.salt
        self.seed = seed
        self.output: list[int] = []
        self.in_flight = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_cacheable_tokens = _UNLIMITED
        self.num_published = 0
        self.num_unsettled = 0
        self.blocks: list[int] = []
        self.prefix = CachedPrefix.start(source.salt)
        self.row = -1
        self.residency = 0
        self.wide = WideOptions.of(source.params, source.bad_words)
        self.wide_row = -1
        self.logprobs: list[TokenLogprobs | FullLogprobs] | None = None if source.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.num_rated_tokens = self.num_prompt_tokens
        if source.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]
            self.num_rated_tokens = 1
        self.step = -1
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_check = stop_check
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrived_s=arrived_s)
        self.leader: Request | None = None
        self.followers: list[Request] = []

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens that the host has seen."""
        return self.num_prompt_tokens + len(self.output)

    def known_ids(self, start: int, end: int) -> Int32Array:
        """Ids of the positions ``[start, end)``, all known."""
        split = self.num_prompt_tokens
        if end <= split:
            return self.prompt[start:end]
        tail = np.array(self.output[max(start - split, 0) : end - split], dtype=np.int32)
        return np.concatenate([self.prompt[start:], tail]) if start < split else tail


def choice_seed(seed: int | None, index: int) -> int:
    """The seed of one of a request's choices: the request's own for the first; without one, a fresh one for each."""
    if seed is None:
        return secrets.randbits(63)
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
