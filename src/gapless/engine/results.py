"""A collected step is applied to its requests here: :class:`ResultApplier`, and the one way in which a request ends.

A result belongs to the request named in its batch, never to the row's present owner. Tokens that arrive for a request
that has ended meanwhile are dropped everywhere. Engine thread only.
"""

from itertools import islice
from math import isnan
from typing import NamedTuple

from gapless.engine.logprobs import FullLogprobs, TokenLogprobs, token_logprobs_of
from gapless.engine.request import Request, RequestState
from gapless.engine.scheduler import Scheduler
from gapless.outputs import FinishReason, RequestMetrics
from gapless.pipeline.ring import CollectedStep

__all__ = ["RequestUpdate", "ResultApplier"]


class RequestUpdate(NamedTuple):
    """News of one request for its caller.

    Attributes:
        token_ids: tokens not published before.
        text: what of a request with stop strings became final text since the last update, without the match; ``None``
            for other requests, whose text callers make themselves.
        finish_reason: set in the last update.
        stop_reason: the stop string, or the id in ``params.stop_token_ids``, that ended it.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        logprobs: those of ``token_ids``, if they were asked for.
        prompt_logprobs: one for each prompt token but the first, if they were asked for; ``None`` for a request that
            ended before they were complete.
    """

    request_id: int
    token_ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None
    num_cached_tokens: int
    metrics: RequestMetrics
    logprobs: list[TokenLogprobs | FullLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


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
        logprobs = self._take_logprobs(step, now_s)
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
            if request.logprobs is not None:
                rated = logprobs[sample - 1]
                request.logprobs.append(
                    rated if isinstance(rated, FullLogprobs) else rated.cut(request.params.logprobs or 0)
                )
            if request.metrics.first_token_s is None:
                request.metrics.first_token_s = now_s
            if token in request.stop_token_ids:
                if request.state is RequestState.RUNNING:
                    self._scheduler.register(request, request.num_known_tokens - 1)
                request.stop_reason = token if token in request.params.stop_token_ids else None
                self.finish(request, "stop", now_s)
            elif request.stop_check is not None and self._text_ends(request, token):
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
        if request.stop_check is not None:
            reason = self._cut(request, reason)
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

    def _take_logprobs(self, step: CollectedStep, now_s: float) -> dict[int, TokenLogprobs | FullLogprobs]:
        """Give requests their prompts' log-probs; return those of the step's samples, by sample."""
        work, result = step.batch.logprobs, step.result
        if work is None:
            return {}
        assert result.logprobs is not None
        if work.prompt_spans and result.prompt_logprobs is not None:
            rated = iter(token_logprobs_of(result.prompt_logprobs))
            for span in work.prompt_spans:
                own = list(islice(rated, span.num_tokens))
                request = self.live.get(span.request_id)
                if request is None or request.prompt_logprobs is None:
                    continue
                # Chunks come in order, also when the request was preempted between them.
                assert len(request.prompt_logprobs) == span.first
                top = request.params.prompt_logprobs or 0
                request.prompt_logprobs += [each.cut(top) for each in own]
                if any(isnan(each.logprob) for each in own):
                    request.prompt_logprobs = None
                    self._fail(request, now_s)
        found: dict[int, TokenLogprobs | FullLogprobs] = {}
        found.update(zip(work.samples, token_logprobs_of(result.logprobs), strict=True))
        if result.full_logprobs is not None:
            # Rows of their own, so that one that is kept does not keep the others.
            found.update(
                (sample, FullLogprobs(result.full_logprobs[i].copy())) for i, sample in enumerate(work.full_samples)
            )
        return found

    def _text_ends(self, request: Request, token: int) -> bool:
        """Show a token to the judge of the request's text, and ask whether a stop string is complete."""
        assert request.stop_check is not None
        match = request.stop_check.append(token)
        request.num_unsettled = len(request.output) - request.stop_check.num_settled_ids
        return match is not None

    def _cut(self, request: Request, reason: FinishReason) -> FinishReason:
        """End the output of a request with stop strings where its text ends; tokens behind that never were."""
        assert request.stop_check is not None
        match = request.stop_check.end()
        request.num_unsettled = 0
        if match is None:
            return reason
        del request.output[match.num_ids :]
        if reason in ("abort", "error"):
            return reason
        if request.state is RequestState.RUNNING:
            # As with EOS: the last token counts as one that was never fed back, whether or not it was.
            self._scheduler.register(request, request.num_known_tokens - 1)
        request.stop_reason = match.stop
        return "stop"

    def _fail(self, request: Request, now_s: float) -> None:
        self._scheduler.forget_prefix(request)
        request.error = (
            f"the model's logits were not finite at output token {len(request.output)}; "
            "the weights or the dtype cannot represent this input (try dtype=float32)"
        )
        self.finish(request, "error", now_s)

    def _publish(self, request: Request) -> None:
        settled = len(request.output) - request.num_unsettled
        news = request.output[request.num_published : settled]
        text = None if request.stop_check is None else request.stop_check.take_text()
        if not news and not text and request.finish_reason is None:
            return
        self.num_output_tokens += len(news)
        published, request.num_published = request.num_published, settled
        self._updates.append(
            RequestUpdate(
                request.id,
                news,
                text,
                request.finish_reason,
                request.stop_reason,
                request.error,
                request.num_cached_tokens,
                request.metrics,
                None if request.logprobs is None else request.logprobs[published:settled],
                _complete_prompt_logprobs(request),
            )
        )


def _complete_prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    found = request.prompt_logprobs
    return found if found is not None and len(found) == request.num_prompt_tokens else None
