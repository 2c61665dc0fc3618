"""From the engine's news to what a caller gets: :func:`final_output` at the end, :class:`GrowingOutput` on the way.

Both follow one rule of text: it is the tokenizer's decoding of the sampled ids, without the text of the EOS or stop
token that ended the request. The ids always hold that token. An object belongs to one request and one thread.
"""

from collections.abc import Sequence

from gapless.engine.results import RequestUpdate
from gapless.outputs import CompletionOutput, FinishReason, RequestOutput
from gapless.prompts import PreparedPrompt
from gapless.sampling_params import SamplingParams
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.detokenizer import IncrementalDetokenizer

__all__ = ["GrowingOutput", "final_output"]


def final_output(
    request_id: str, prompt: PreparedPrompt, params: SamplingParams, tokenizer: Tokenizer, update: RequestUpdate
) -> RequestOutput:
    """The output of a request whose only news is its end."""
    assert update.finish_reason is not None
    text = ""
    if params.detokenize:
        ids = _shown_ids(update.token_ids, update.finish_reason)
        text = tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
    return _output(request_id, prompt, update, text=text, token_ids=update.token_ids)


class GrowingOutput:
    """Adds up the news of one request; each :meth:`add` returns a snapshot of its own.

    Args:
        request_id: as the caller knows it.
        prompt: what was asked.
        params: whether and how to make text.
        tokenizer: of the model.
    """

    def __init__(self, request_id: str, prompt: PreparedPrompt, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._token_ids: list[int] = []
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else None
        )

    def add(self, updates: Sequence[RequestUpdate]) -> RequestOutput:
        """Take the next news, one or more at once, and return the output so far."""
        for update in updates:
            self._token_ids += update.token_ids
            if self._detokenizer is not None:
                self._detokenizer.append(_shown_ids(update.token_ids, update.finish_reason))
                if update.finish_reason is not None:
                    self._detokenizer.finish()
        text = "" if self._detokenizer is None else self._detokenizer.text
        return _output(self._request_id, self._prompt, updates[-1], text=text, token_ids=list(self._token_ids))


def _shown_ids(token_ids: list[int], finish_reason: FinishReason | None) -> list[int]:
    """The ids that make text: all but the last one of a request that a token ended."""
    return token_ids[:-1] if finish_reason == "stop" else token_ids


def _output(
    request_id: str, prompt: PreparedPrompt, last: RequestUpdate, *, text: str, token_ids: list[int]
) -> RequestOutput:
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=prompt.text,
        prompt_token_ids=prompt.token_ids,
        outputs=[completion],
        finished=last.finish_reason is not None,
        num_cached_tokens=last.num_cached_tokens,
        metrics=last.metrics,
    )
