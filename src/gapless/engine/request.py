"""One generation and its state: :class:`Request`. Only the engine loop mutates it.

Life cycle::

    WAITING --admit--> RUNNING --last step enqueued--> RETIRING --collected--> FINISHED
       ^                  |
       +----- preempt ----+            (an EOS, an abort or an error finishes it from any state)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from gapless.engine.prefix_cache import CachedPrefix
from gapless.outputs import FinishReason, RequestMetrics
from gapless.pipeline.batch import Int32Array
from gapless.sampling_params import SamplingParams

__all__ = ["EngineRequest", "Request", "RequestState"]


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
        salt: becomes part of every prefix-cache key; requests share blocks only under equal salts.
    """

    prompt_token_ids: Sequence[int]
    params: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    streams: bool = False
    salt: bytes = b""


class Request:
    """A request inside the engine.

    ``length = prompt + output + in flight``; ``num_computed_tokens`` counts positions whose KV is enqueued.
    """

    __slots__ = (
        "blocks",
        "error",
        "finish_reason",
        "id",
        "in_flight",
        "max_tokens",
        "metrics",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published",
        "output",
        "params",
        "prefix",
        "prompt",
        "residency",
        "row",
        "salt",
        "seed",
        "state",
        "step",
        "stop_reason",
        "stop_token_ids",
        "streams",
    )

    def __init__(self, request_id: int, source: EngineRequest, *, max_tokens: int, seed: int, arrived_s: float) -> None:
        self.id = request_id
        self.params = source.params
        self.prompt: Int32Array = np.asarray(source.prompt_token_ids, dtype=np.int32)
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
        self.num_published = 0
        self.blocks: list[int] = []
        self.prefix = CachedPrefix.start(source.salt)
        self.row = -1
        self.residency = 0
        self.step = -1
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        self.metrics = RequestMetrics(arrived_s=arrived_s)

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
