"""The sampling options that every kind of request has: :class:`SamplingFields`, under the names that vLLM uses.

A field that is left out (or ``null``) takes the server's default, which may come from its command line or the model's
``generation_config.json``. Ranges are those of :class:`gapless.SamplingParams`, which checks them. Pure functions.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from gapless.errors import RequestError, shown
from gapless.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from gapless.server.protocol.fields import AtMost, LogitBias, RequestModel, StopStrings

__all__ = ["MAX_CHOICES_OF_A_REQUEST", "SamplingFields", "ScoringFields", "sampling_params"]

MAX_CHOICES_OF_A_REQUEST: Final = 128
_TokenId = Annotated[int, Field(json_schema_extra={"minimum": 0})]
# The work before a request is queued is bounded by these: the checks run in the event loop, for each prompt.
_MAX_ALLOWED_IDS: Final = 65_536
_MAX_WORDS: Final = 1024
_MAX_WORD_CHARACTERS: Final = 256
_Word = Annotated[str, Field(max_length=_MAX_WORD_CHARACTERS)]


class SamplingFields(RequestModel):
    """How tokens are chosen and when it ends."""

    temperature: float | None = Field(None, json_schema_extra={"minimum": 0}, description="0 is greedy.")
    top_p: float | None = Field(None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1})
    top_k: int | None = Field(None, json_schema_extra={"minimum": -1}, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 1})
    presence_penalty: float | None = Field(None, json_schema_extra={"minimum": -2, "maximum": 2})
    frequency_penalty: float | None = Field(None, json_schema_extra={"minimum": -2, "maximum": 2})
    repetition_penalty: float | None = Field(None, json_schema_extra={"minimum": 1e-6, "maximum": 1e6})
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[_TokenId], AtMost(_MAX_ALLOWED_IDS)] | None = Field(
        None, json_schema_extra={"minItems": 1}, description="No other id is ever sampled."
    )
    bad_words: Annotated[list[_Word], AtMost(_MAX_WORDS)] | None = Field(
        None, description="Words that may not come up."
    )
    seed: int | None = Field(None, json_schema_extra={"minimum": -(2**63), "maximum": 2**63 - 1})
    min_tokens: int | None = Field(None, json_schema_extra={"minimum": 0})
    stop: StopStrings = Field(None, description="Strings that end the text; they are not part of it.")
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[_TokenId], AtMost(MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description=f"At most {MAX_STOP_TOKEN_IDS}."
    )
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text; true by default.")
    cache_salt: str | None = Field(
        None, max_length=256, description="Prompts share cached blocks only under equal salts."
    )


class ScoringFields(SamplingFields):
    """Options of chats and completions, but not of responses."""

    n: int | None = Field(None, json_schema_extra={"minimum": 1, "maximum": MAX_CHOICES_OF_A_REQUEST})
    prompt_logprobs: int | None = Field(
        None, json_schema_extra={"minimum": 0, "maximum": 20}, description="Log-probs of the prompt's tokens."
    )


_OF_TOKENS: Final = tuple(name for name in ScoringFields.model_fields if name not in {"logit_bias", "cache_salt"})


def sampling_params(
    fields: SamplingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    max_tokens_default: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The options that a request has chosen; the rest is filled with the server's defaults when it is submitted.

    The one default that depends on the kind of request is ``max_tokens``, where neither the operator nor the model has
    chosen one.

    Args:
        fields: of the request.
        defaults: what a request without any options would get.
        max_tokens: the request's own.
        max_tokens_default: the built-in one of this kind of request; ``None`` is the rest of the context.
        logprobs: the request's.
        prompt_logprobs: to ask for, if the request itself does not.

    Raises:
        RequestError: naming field and value.
    """
    given = {name: value for name in _OF_TOKENS if (value := getattr(fields, name, None)) is not None}
    if fields.logit_bias is not None:
        given["logit_bias"] = _by_token_id(fields.logit_bias)
    n = given.get("n", 1)
    if n > MAX_CHOICES_OF_A_REQUEST:
        raise RequestError(f"n={n} must be from 1 to {MAX_CHOICES_OF_A_REQUEST}")
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", given.get("prompt_logprobs", prompt_logprobs))):
        if value is not None:
            if value < 0:  # offline -1 stands for the whole vocabulary
                raise RequestError(f"{name}={shown(value)} must be from 0 to 20")
            given[name] = value
    if max_tokens is None:
        # A value that nobody has chosen is of a marked type, see gapless.sampling_params.unchosen.
        max_tokens = defaults.max_tokens if type(defaults.max_tokens) is int else max_tokens_default
    return SamplingParams(**given, max_tokens=max_tokens)


def _by_token_id(bias: Mapping[str, float]) -> dict[int, Any]:
    by_id: dict[int, Any] = {}
    for key, value in bias.items():
        # isdecimal alone would take the digits of every script, and int() spaces and underscores.
        if not (key.isascii() and key.isdecimal() and len(key) < 20):
            raise RequestError(f"logit_bias has the key {shown(key)}, which is no token id; use decimal numbers")
        if int(key) in by_id:
            raise RequestError(f"logit_bias names token {int(key)} twice; give it once")
        by_id[int(key)] = value
    return by_id
