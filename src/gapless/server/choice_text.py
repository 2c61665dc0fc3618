"""The text of one choice: :class:`ChoiceText`, tokens in, :class:`ChoiceDelta` out.

The rules are those of :mod:`gapless.output_building` and of the engine's own end by stop strings: the text is the
tokenizer's decoding of the ids without the token that ended the choice, and everything ends with the token that
completes a stop string. What nobody has taken yet adds up to one delta. An object belongs to one request and one
thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.engine.logprobs import TokenLogprobs
from gapless.output_building import logprobs_by_id, shown_ids
from gapless.outputs import FinishReason, TokenLogprobsById
from gapless.sampling_params import SamplingParams
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.detokenizer import IncrementalDetokenizer
from gapless.text.stop_strings import StopStringCheck

__all__ = ["ChoiceDelta", "ChoiceText"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceDelta:
    """News of one choice since the last one.

    Attributes:
        index: which of the request's choices.
        text: final text; it holds U+FFFD only if the whole text does.
        token_ids: tokens that no stop string can cut off any more, the one that ended the choice included. Their text
            may come with a later delta.
        logprobs: one mapping for each of ``token_ids``, if they were asked for.
        finish_reason: set in the choice's last delta.
        stop_reason: the stop string, or the id in ``stop_token_ids``, that ended it.
        error: what went wrong, when ``finish_reason`` is ``"error"``.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobsById] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None


class ChoiceText:
    """Adds up what one choice is told.

    Args:
        index: which of the request's choices.
        params: whether and how to make text.
        tokenizer: of the model.
        stop_check: the judge of its text, if there are stop strings.

    Attributes:
        finish_reason: set when it has ended; whatever comes later is not part of it.
        num_tokens: those that belong to it for sure; final when it has ended.
    """

    def __init__(
        self, index: int, params: SamplingParams, tokenizer: Tokenizer, stop_check: StopStringCheck | None
    ) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop_check = stop_check
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize and stop_check is None
            else None
        )
        self._num_taken = 0
        self._tokens: list[int] = []  # not taken yet; the last ones may be cut off
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self._text = ""
        self._stop_reason: int | str | None = None
        self._error: str | None = None
        self._end_taken = False

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> None:
        """Take the next tokens, none of which ends it as far as the engine knows; a stop string may.

        Args:
            token_ids: any number of them.
            logprobs: one for each, if they were asked for.
        """
        if self.finish_reason is not None:
            return
        self._hold(token_ids, logprobs)
        if self._detokenizer is not None:
            self._text += self._detokenizer.append(token_ids)
        if self._stop_check is None:
            self.num_tokens += len(token_ids)
        else:
            self._judge(self._stop_check, token_ids)

    def end(
        self,
        reason: FinishReason,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] | None = None,
        *,
        stop_reason: int | None = None,
        error: str | None = None,
    ) -> None:
        """Take the last tokens and the reason of the end; a stop string in them comes first."""
        shown = shown_ids(list(token_ids), reason)
        self.add(shown, logprobs and logprobs[: len(shown)])
        if self.finish_reason is not None:
            return
        # The token that ended it has no text.
        self._hold(token_ids[len(shown) :], logprobs and logprobs[len(shown) :])
        self.finish_reason, self._stop_reason, self._error = reason, stop_reason, error
        if self._detokenizer is not None:
            self._text += self._detokenizer.finish()
        if self._stop_check is not None:
            self._cut(self._stop_check)
        self.num_tokens = self._num_taken + len(self._tokens)

    def fail(self, error: str) -> None:
        """End it because its text cannot be made; what was final before stays."""
        self.finish_reason, self._stop_reason, self._error = "error", None, error
        kept = self.num_tokens - self._num_taken
        del self._tokens[kept:]
        if self._logprobs is not None:
            del self._logprobs[kept:]

    @property
    def has_news(self) -> bool:
        """Whether :meth:`take` has anything to give."""
        if self.finish_reason is not None:
            return not self._end_taken
        return bool(self._text) or self.num_tokens > self._num_taken

    def take(self) -> ChoiceDelta | None:
        """All news since the last call, or ``None``."""
        if not self.has_news:
            return None
        count = self.num_tokens - self._num_taken
        token_ids, self._tokens = self._tokens[:count], self._tokens[count:]
        logprobs = None
        if self._logprobs is not None:
            logprobs = logprobs_by_id(token_ids, self._logprobs[:count], self._tokenizer)
            del self._logprobs[:count]
        text, self._text = self._text, ""
        self._num_taken = self.num_tokens
        self._end_taken = self.finish_reason is not None
        return ChoiceDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            error=self._error,
        )

    def _hold(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        self._tokens += token_ids
        if self._logprobs is not None:
            self._logprobs += logprobs or ()

    def _judge(self, check: StopStringCheck, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if check.append(token) is not None:
                self.finish_reason = "stop"
                self._cut(check)
                break
        self._text += check.take_text()
        self.num_tokens = self._num_taken + len(self._tokens) if self.finish_reason else check.num_settled_ids

    def _cut(self, check: StopStringCheck) -> None:
        """End where the text ends; what lies behind never was."""
        match = check.end()
        self._text += check.take_text()
        if match is None:
            return
        kept = match.num_ids - self._num_taken
        del self._tokens[kept:]
        if self._logprobs is not None:
            del self._logprobs[kept:]
        if self.finish_reason not in ("abort", "error"):
            self.finish_reason, self._stop_reason = "stop", match.stop
