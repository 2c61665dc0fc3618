"""Which requests can be served at all: :class:`AdmissionLimits`, checked in the caller before anything is queued."""

from collections.abc import Sequence
from dataclasses import dataclass

from gapless.engine.request import EngineRequest
from gapless.errors import PromptTooLongError, RequestError, shown
from gapless.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, are_token_ids

__all__ = ["MAX_ENDING_TOKENS", "AdmissionLimits"]

MAX_ENDING_TOKENS = MAX_STOP_TOKEN_IDS + 64
"""Most ids that may end one request: those it names and the model's EOS ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionLimits:
    """What one request may need.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: positions the model has.
        kv_capacity: tokens that the whole KV cache holds.
        max_waiting: most requests queued and not yet running.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity: int
    max_waiting: int

    def check(self, request: EngineRequest) -> int:
        """Return how many tokens the request may sample.

        The last token sampled is never fed back, so a context of ``c`` positions gives ``c - prompt + 1`` tokens.

        Raises:
            RequestError: an empty prompt or an id outside the vocabulary.
            PromptTooLongError: it can never fit.
        """
        prompt = request.prompt_token_ids
        if not len(prompt):
            raise RequestError("the prompt is empty: at least one token is needed")
        if not are_token_ids(prompt, self.vocab_size):
            self._check_each_id(prompt)
        request.params.check_vocabulary(self.vocab_size)
        _check_bad_words(request)
        _check_some_token_is_left(request)
        if len(request.stop_token_ids) > MAX_ENDING_TOKENS:
            raise RequestError(
                f"{len(request.stop_token_ids)} ids would end the request; at most {MAX_ENDING_TOKENS} are allowed"
            )
        if len(prompt) > self.max_model_len:
            raise PromptTooLongError(
                f"the prompt has {len(prompt)} tokens and the context holds max_model_len={self.max_model_len}: "
                "shorten the prompt"
            )
        if len(prompt) > self.kv_capacity:
            raise PromptTooLongError(
                f"the prompt needs {len(prompt)} tokens of KV cache and {self.kv_capacity} are available: shorten it "
                "or give the cache more memory (kv_cache_memory_bytes, num_blocks)"
            )
        room = min(self.max_model_len, self.kv_capacity) - len(prompt) + 1
        wanted = request.params.max_tokens
        return room if wanted is None else min(wanted, room)

    def _check_each_id(self, prompt: Sequence[int]) -> None:
        for index, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"prompt_token_ids[{index}]={shown(token)} is not in the vocabulary of {self.vocab_size} tokens"
                )


def _check_bad_words(request: EngineRequest) -> None:
    longer = [word for word in request.bad_words if len(word) > 1]
    if len(longer) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words make {len(longer)} words of several tokens; at most {MAX_BAD_WORDS} are allowed: give fewer"
        )
    longest = max(map(len, longer), default=0)
    if longest > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words has a word of {longest} tokens; at most {MAX_BAD_WORD_TOKENS} are allowed: forbid a part of it"
        )


def _check_some_token_is_left(request: EngineRequest) -> None:
    """Options that contradict each other would fail at the first token, with a message about logits."""
    allowed = request.params.allowed_token_ids
    if allowed is None:
        return
    left = set(allowed) - {word[0] for word in request.bad_words if len(word) == 1}
    if not left:
        raise RequestError("bad_words forbids every id of allowed_token_ids: no token could be sampled")
    if request.params.min_tokens and left <= request.stop_token_ids:
        raise RequestError(
            f"allowed_token_ids has only ids that end the request, and min_tokens={request.params.min_tokens} forbids "
            "them: no token could be sampled"
        )
