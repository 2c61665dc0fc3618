"""``/v1/completions`` on the wire: the request and the answer, which is also the form of a stream's chunks."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from gapless.server.protocol.answers import FinishReasonOut, PromptLogprobs, StopReason, Usage
from gapless.server.protocol.chat import StreamOptions, TextFormat
from gapless.server.protocol.fields import Metadata, ModelName, Only, Prompt, ServiceTier
from gapless.server.protocol.sampling import ScoringFields

__all__ = [
    "Completion",
    "CompletionChoice",
    "CompletionChunk",
    "CompletionChunkChoice",
    "CompletionLogprobs",
    "CompletionRequest",
]


class CompletionRequest(ScoringFields):
    """Prompts to be continued."""

    model: ModelName = None
    prompt: Prompt = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    max_tokens: int | None = Field(
        None, json_schema_extra={"minimum": 0}, description="16 by default; 0 scores the prompt (see `echo`)."
    )
    logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 20})
    echo: bool | None = Field(None, description="The prompt is part of the text, and of the log-probs.")
    best_of: int | None = Field(None, description="Only if it equals `n`.")
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its BOS to a text; true by default."
    )
    response_format: TextFormat | None = None

    user: str | None = Field(None, description="Taken and not used.")
    metadata: Metadata = None
    service_tier: ServiceTier = None
    store: Annotated[Any, Only(False, because="nothing is stored")] = None
    suffix: Annotated[Any, Only("", because="nothing is put before a suffix")] = None


class CompletionLogprobs(BaseModel):
    """One entry for each token of the text, in four lists."""

    text_offset: list[int] = Field(description="Where the token's text starts in `text`.")
    token_logprobs: list[float | None] = Field(description="`null` for the first token of a prompt.")
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(BaseModel):
    """One continuation; those of the first prompt come first."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonOut
    stop_reason: StopReason
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """The continuations."""

    id: str
    object: Literal["text_completion"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None


class CompletionChunkChoice(BaseModel):
    """News of one continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReasonOut | None
    stop_reason: StopReason = None


class CompletionChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
