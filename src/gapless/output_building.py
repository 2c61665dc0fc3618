"""From the engine's news to what a caller gets: :func:`final_output` at the end, :class:`GrowingOutput` on the way.

Both follow one rule of text: it is the tokenizer's decoding of the sampled ids, without the text of the EOS or stop
token that ended the request. The ids always hold that token. The text of a request with stop strings comes with its
news, since the engine's thread has to make it anyway. An object belongs to one request and one thread.
"""

from collections.abc import Sequence

import numpy as np

from gapless.engine.logprobs import FullLogprobs, TokenLogprobs
from gapless.engine.results import RequestUpdate
from gapless.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobsById,
)
from gapless.prompts import PreparedPrompt
from gapless.sampling_params import SamplingParams
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.detokenizer import IncrementalDetokenizer

__all__ = ["GrowingOutput", "final_output", "logprobs_by_id", "prompt_logprobs_by_id", "shown_ids", "sum_logprobs"]


def final_output(
    request_id: str,
    prompt: PreparedPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    updates: Sequence[RequestUpdate],
) -> RequestOutput:
    """The output of a request whose only news are the ends of its choices, given in their order."""
    completions = []
    for index, update in enumerate(updates):
        assert update.finish_reason is not None
        text = update.text
        if text is None:
            text = ""
            if params.detokenize:
                ids = shown_ids(update.token_ids, update.finish_reason)
                text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        logprobs = logprobs_by_id(update.token_ids, update.logprobs, tokenizer)
        completions.append(_completion(index, update, text=text, token_ids=update.token_ids, logprobs=logprobs))
    output = _output(request_id, prompt, completions, updates)
    output.prompt_logprobs = prompt_logprobs_by_id(prompt, updates[0].prompt_logprobs, tokenizer)
    return output


class GrowingOutput:
    """Adds up the news of one request; each :meth:`add` returns a snapshot.

    Args:
        request_id: as the caller knows it.
        prompt: what was asked.
        params: whether and how to make text.
        tokenizer: of the model.
        choice_ids: the engine's ids of the request's choices, in their order.
    """

    def __init__(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer,
        choice_ids: Sequence[int],
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._prompt_logprobs: list[TokenLogprobsById | None] | None = None
        self._choices = {
            choice_id: _GrowingChoice(index, params, tokenizer) for index, choice_id in enumerate(choice_ids)
        }

    def add(self, updates: Sequence[RequestUpdate]) -> RequestOutput:
        """Take the next news, one or more at once, and return the output so far.

        A choice without news is the same object as in the snapshot before.
        """
        changed = {update.request_id: self._choices[update.request_id] for update in updates}
        for update in updates:
            changed[update.request_id].add(update)
        for choice in changed.values():
            choice.show()
        choices = self._choices.values()
        latest = [choice.latest for choice in choices if choice.latest is not None]
        output = _output(self._request_id, self._prompt, [choice.shown for choice in choices], latest)
        if self._prompt_logprobs is None:
            self._prompt_logprobs = prompt_logprobs_by_id(self._prompt, latest[0].prompt_logprobs, self._tokenizer)
        output.prompt_logprobs = self._prompt_logprobs
        return output


class _GrowingChoice:
    """One choice and its latest snapshot."""

    def __init__(self, index: int, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self.latest: RequestUpdate | None = None
        self.shown = CompletionOutput(index=index, text="", token_ids=[])
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobsById] | None = None if params.logprobs is None else []
        self._tokenizer = tokenizer
        self._text = ""
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize and not params.stops
            else None
        )

    def add(self, update: RequestUpdate) -> None:
        self.latest = update
        self._token_ids += update.token_ids
        if self._logprobs is not None:
            self._logprobs += logprobs_by_id(update.token_ids, update.logprobs, self._tokenizer) or []
        if self._detokenizer is None:
            self._text += update.text or ""
            return
        self._detokenizer.append(shown_ids(update.token_ids, update.finish_reason))
        if update.finish_reason is not None:
            self._detokenizer.finish()

    def show(self) -> None:
        assert self.latest is not None
        text = self._text if self._detokenizer is None else self._detokenizer.text
        logprobs = None if self._logprobs is None else list(self._logprobs)
        self.shown = _completion(
            self.shown.index, self.latest, text=text, token_ids=list(self._token_ids), logprobs=logprobs
        )


def shown_ids(token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
    """The ids that make text: all but the last one of a request that a token ended."""
    return token_ids[:-1] if finish_reason == "stop" else token_ids


def logprobs_by_id(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | FullLogprobs] | None, tokenizer: Tokenizer
) -> list[TokenLogprobsById] | None:
    """The log-probs of output tokens as callers get them; ``None`` where none were asked for."""
    if logprobs is None:
        return None
    return [_at_place(token, rated, tokenizer) for token, rated in zip(token_ids, logprobs, strict=True)]


def prompt_logprobs_by_id(
    prompt: PreparedPrompt, logprobs: Sequence[TokenLogprobs | None] | None, tokenizer: Tokenizer
) -> list[TokenLogprobsById | None] | None:
    """The prompt's log-probs as callers get them; ``None`` where there are none."""
    if logprobs is None:
        return None
    return [
        None if rated is None else _at_place(token, rated, tokenizer)
        for token, rated in zip(prompt.token_ids, logprobs, strict=True)
    ]


def sum_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobsById] | None) -> float | None:
    """The sum of the sampled tokens' log-probs, if there are any."""
    if logprobs is None:
        return None
    return sum(place[token].logprob for token, place in zip(token_ids, logprobs, strict=True))


def _at_place(token: int, rated: TokenLogprobs | FullLogprobs, tokenizer: Tokenizer) -> TokenLogprobsById:
    if isinstance(rated, FullLogprobs):
        order = np.argsort(-rated.values, kind="stable")
        rank = int((rated.values > rated.values[token]).sum()) + 1
        rated = TokenLogprobs(float(rated.values[token]), rank, order.tolist(), rated.values[order].tolist())
    found = {token: Logprob(rated.logprob, rated.rank, tokenizer.decode([token], skip_special_tokens=False))}
    for rank, (other, logprob) in enumerate(zip(rated.top_ids, rated.top_logprobs, strict=True), 1):
        if other != token:
            found[other] = Logprob(logprob, rank, tokenizer.decode([other], skip_special_tokens=False))
    return found


def _completion(
    index: int,
    last: RequestUpdate,
    *,
    text: str,
    token_ids: list[int],
    logprobs: list[TokenLogprobsById] | None,
) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        logprobs=logprobs,
        cumulative_logprob=sum_logprobs(token_ids, logprobs),
    )


def _output(
    request_id: str, prompt: PreparedPrompt, completions: list[CompletionOutput], latest: Sequence[RequestUpdate]
) -> RequestOutput:
    """Args:
    completions: all choices.
    latest: the latest news of each choice that has had any, the first of them first.
    """
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=completions,
        finished=all(completion.finish_reason is not None for completion in completions),
        # Further choices find the blocks of the first: that is no prefix that was known before.
        num_cached_tokens=latest[0].num_cached_tokens,
        metrics=_joint_metrics([update.metrics for update in latest], num_choices=len(completions)),
    )


def _joint_metrics(metrics: Sequence[RequestMetrics], *, num_choices: int) -> RequestMetrics:
    """Of several choices: the first token of any, the end of all."""
    if num_choices == 1:
        return metrics[0]
    firsts = [each.first_token_s for each in metrics if each.first_token_s is not None]
    ends = [each.finished_s for each in metrics if each.finished_s is not None]
    return RequestMetrics(
        arrived_s=metrics[0].arrived_s,
        scheduled_s=metrics[0].scheduled_s,
        first_token_s=min(firsts, default=None),
        finished_s=max(ends) if len(ends) == num_choices else None,
        num_preemptions=sum(each.num_preemptions for each in metrics),
    )
