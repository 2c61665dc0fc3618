"""A collected step is applied to its requests here: :class:`ResultApplier`, and the one way in which a request ends.

A result belongs to the request named in its batch, never to the row's present owner. Tokens that arrive for a request
that has ended meanwhile are dropped everywhere. Engine thread only.
"""

from typing import NamedTuple

from gapless.engine.request import Request, RequestState
from gapless.engine.scheduler import Scheduler
from gapless.outputs import FinishReason, RequestMetrics
from gapless.pipeline.ring import CollectedStep

__all__ = ["RequestUpdate", "ResultApplier"]


class RequestUpdate(NamedTuple):
    """News of one request for its caller.

    Attributes:
        token_ids: tokens not published before.
        finish_reason: set in the last update.
        num_cached_tokens: prompt tokens that came from the prefix cache.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None
    error: str | None
    num_cached_tokens: int
    metrics: RequestMetrics


class ResultApplier:
    """Live requests by id, and what results and aborts do to them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.live: dict[int, Request] = {}
        self.num_aborted = 0
        self.num_output_tokens = 0
        self._scheduler = scheduler
        self._updates: list[RequestUpdate] = []

    def apply(self, step: CollectedStep, now_s: float) -> None:
        """Give each entry's token to its request."""
        tokens = step.result.tokens.tolist()
        healthy = step.result.healthy
        all_healthy = bool(healthy.all())
        live = self.live
        block_size = self._scheduler.limits.block_size
        sample = 0
        for entry in step.batch.entries:
            request = live.get(entry.request_id)
            if not entry.samples:
                if entry.final and request is not None:
                    self.finish(request, "length", now_s)
                continue
            token, ok = tokens[sample], all_healthy or bool(healthy[sample])
            sample += 1
            if request is None:
                continue
            request.in_flight -= 1
            assert request.in_flight >= 0
            if not ok:
                self._fail(request, now_s)
                continue
            output = request.output
            output.append(token)
            if request.metrics.first_token_s is None:
                request.metrics.first_token_s = now_s
            if token in request.stop_token_ids:
                if request.state is RequestState.RUNNING:
                    self._scheduler.register(request, request.num_known_tokens - 1)
                request.stop_reason = token if token in request.params.stop_token_ids else None
                self.finish(request, "stop", now_s)
            elif len(output) >= request.max_tokens:
                self.finish(request, "length", now_s)
            else:
                if (
                    request.num_computed_tokens // block_size > request.prefix.num_blocks
                    and request.state is RequestState.RUNNING
                    and request.residency == entry.residency
                ):
                    self._scheduler.register(request, request.num_known_tokens)
                if request.streams:
                    self._publish(request)

    def abort(self, request_id: int, now_s: float) -> None:
        """End a request at its caller's wish; an ended or unknown id is nothing."""
        request = self.live.get(request_id)
        if request is not None:
            self.num_aborted += 1
            self.finish(request, "abort", now_s)

    def finish(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """The one way a request ends, from any state and at most once."""
        assert request.state is not RequestState.FINISHED
        self._scheduler.withdraw(request)
        request.state = RequestState.FINISHED
        request.finish_reason = reason
        request.metrics.finished_s = now_s
        del self.live[request.id]
        self._publish(request)

    def take_updates(self) -> list[RequestUpdate]:
        """Return what has to be told to callers, once."""
        updates, self._updates = self._updates, []
        return updates

    def _fail(self, request: Request, now_s: float) -> None:
        self._scheduler.forget_prefix(request)
        request.error = (
            f"the model's logits were not finite at output token {len(request.output)}; "
            "the weights or the dtype cannot represent this input (try dtype=float32)"
        )
        self.finish(request, "error", now_s)

    def _publish(self, request: Request) -> None:
        news = request.output[request.num_published :]
        self.num_output_tokens += len(news)
        request.num_published = len(request.output)
        self._updates.append(
            RequestUpdate(
                request.id,
                news,
                request.finish_reason,
                request.stop_reason,
                request.error,
                request.num_cached_tokens,
                request.metrics,
            )
        )
