"""News as the API process believes them: unpacked and checked, so that nothing later has to distrust them.

Pure functions, and who hears the result: :class:`ChoiceReceiver`. A message that does not hold together raises
:class:`MalformedMessageError` before any of it is used.
"""

from typing import NamedTuple, Protocol

from gapless.engine.logprobs import TokenLogprobs
from gapless.errors import EngineDeadError
from gapless.outputs import FinishReason
from gapless.server.encoding import MalformedMessageError, unpacked_choice_ids, unpacked_floats, unpacked_ids
from gapless.server.messages import ChoiceNews, RatedToken, StepNews

__all__ = ["ChoiceReceiver", "ChoiceUpdate", "StepUpdates", "step_updates"]


class ChoiceUpdate(NamedTuple):
    """News of one choice; see :class:`~gapless.engine.results.RequestUpdate`."""

    choice_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None
    error: str | None
    num_cached_tokens: int
    num_preemptions: int
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    queue_s: float | None = None


class ChoiceReceiver(Protocol):
    """Hears of one choice, in the event loop; must not block."""

    def accepted(self, choice_id: int) -> None:
        """The choice is queued under this id."""

    def add_token(self, token: int) -> None:
        """One more token, and nothing else."""

    def add(self, update: ChoiceUpdate) -> None:
        """Any other news; the last one has a ``finish_reason``."""

    def fail(self, error: EngineDeadError) -> None:
        """No more news will come."""


class StepUpdates(NamedTuple):
    """A step's news: ``tokens[i]`` is the only news of ``choice_ids[i]``; ``others`` are the rest."""

    choice_ids: list[int]
    tokens: list[int]
    others: list[ChoiceUpdate]


def step_updates(news: StepNews, vocab_size: int) -> StepUpdates:
    """Unpack and check.

    Raises:
        MalformedMessageError: lists of different lengths, or an id outside the vocabulary.
    """
    choice_ids, tokens = unpacked_choice_ids(news.choice_ids), _tokens(news.tokens, vocab_size)
    if len(choice_ids) != len(tokens):
        raise MalformedMessageError(f"{len(tokens)} tokens for {len(choice_ids)} choices")
    return StepUpdates(choice_ids, tokens, [_choice_update(each, vocab_size) for each in news.others])


def _choice_update(news: ChoiceNews, vocab_size: int) -> ChoiceUpdate:
    tokens = _tokens(news.token_ids, vocab_size)
    logprobs, prompt_logprobs = news.logprobs, news.prompt_logprobs
    if logprobs is not None and len(logprobs) != len(tokens):
        raise MalformedMessageError(f"{len(logprobs)} log-probs for {len(tokens)} tokens")
    return ChoiceUpdate(
        news.choice_id,
        tokens,
        news.finish_reason,
        news.stop_reason,
        news.error,
        news.num_cached_tokens,
        news.num_preemptions,
        None if logprobs is None else [_rated(each, vocab_size) for each in logprobs],
        None if prompt_logprobs is None else [_maybe_rated(each, vocab_size) for each in prompt_logprobs],
        news.queue_s,
    )


def _maybe_rated(rated: RatedToken | None, vocab_size: int) -> TokenLogprobs | None:
    return None if rated is None else _rated(rated, vocab_size)


def _rated(rated: RatedToken, vocab_size: int) -> TokenLogprobs:
    top_ids, top_logprobs = _tokens(rated.top_ids, vocab_size), unpacked_floats(rated.top_logprobs)
    if len(top_ids) != len(top_logprobs):
        raise MalformedMessageError(f"{len(top_logprobs)} log-probs for {len(top_ids)} tokens")
    return TokenLogprobs(rated.logprob, rated.rank, top_ids, top_logprobs)


def _tokens(data: bytes, vocab_size: int) -> list[int]:
    tokens = unpacked_ids(data)
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise MalformedMessageError("a token id outside the vocabulary")
    return tokens
