"""``/v1/chat/completions`` on the wire: the request, the answer and the chunks of a stream."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from gapless.server.protocol.answers import FinishReasonOut, PromptLogprobs, StopReason, Usage
from gapless.server.protocol.fields import (
    JsonList,
    JsonObject,
    Metadata,
    ModelName,
    Only,
    RequestModel,
    ServiceTier,
    Unsupported,
)
from gapless.server.protocol.sampling import ScoringFields
from gapless.text.chat import ROLES

__all__ = [
    "ChatChoice",
    "ChatChunk",
    "ChatChunkChoice",
    "ChatCompletion",
    "ChatDelta",
    "ChatLogprobs",
    "ChatMessage",
    "ChatRequest",
    "Messages",
    "StreamOptions",
    "TextFormat",
    "TokenLogprob",
    "TopLogprob",
]

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT: list[dict[str, Any]] = [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]


def _message(roles: list[str], content: list[dict[str, Any]], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": "Further keys are handed to the chat template.",
        "properties": {"role": {"enum": roles}, "content": {"anyOf": content}},
        "required": required,
    }


_MESSAGE = {
    "anyOf": [
        _message(sorted(ROLES - {"assistant"}), _CONTENT, ["role", "content"]),
        _message(["assistant"], [*_CONTENT, {"type": "null"}], ["role"]),
    ]
}
Messages = Annotated[JsonList, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]


class StreamOptions(RequestModel):
    """What a stream holds beside the text."""

    include_usage: bool | None = Field(None, description="A last chunk with the usage and no choices.")
    continuous_usage_stats: bool | None = Field(None, description="The usage so far in every chunk.")
    include_obfuscation: bool | None = Field(None, description="Taken and not used: chunks are never padded.")


class TextFormat(RequestModel):
    """The only format of a response."""

    type: Annotated[Any, Only("text", because="there is no structured output")]


class ChatRequest(ScoringFields):
    """A conversation to be answered."""

    model: ModelName = None
    messages: Messages
    max_completion_tokens: int | None = Field(
        None, json_schema_extra={"minimum": 0}, description="The rest of the context by default."
    )
    max_tokens: int | None = Field(
        None, json_schema_extra={"minimum": 0}, description="The older name of `max_completion_tokens`."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, json_schema_extra={"minimum": 0, "maximum": 20})
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")

    add_generation_prompt: bool | None = Field(None, description="Ask for an answer; true by default.")
    continue_final_message: bool | None = Field(None, description="Go on with the last message instead.")
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables of the chat template.")
    response_format: TextFormat | None = None
    tools: JsonList | None = Field(
        None, description='Only with `tool_choice: "none"`, and then not shown to the model.'
    )
    tool_choice: Annotated[Any, Only("none", "auto", because="there are no tool calls")] = None
    parallel_tool_calls: bool | None = Field(None, description="Taken and not used.")

    user: str | None = Field(None, description="Taken and not used.")
    safety_identifier: str | None = Field(None, description="Taken and not used.")
    prompt_cache_key: str | None = Field(None, description="Taken and not used: equal prefixes are always found.")
    metadata: Metadata = None
    service_tier: ServiceTier = None
    store: Annotated[Any, Only(False, because="nothing is stored")] = None
    modalities: Annotated[Any, Only(["text"], because="there is only text")] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    function_call: Annotated[Any, Only("none", because="there are no tool calls")] = None
    functions: Annotated[Any, Only([], because="there are no tool calls")] = None
    audio: Unsupported = None
    prediction: Unsupported = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None
    prompt_cache_options: Unsupported = None
    chat_template: Annotated[Any, Only(because="the template is the server's")] = None


class TopLogprob(BaseModel):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A sampled token."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry for each sampled token."""

    content: list[TokenLogprob] | None
    refusal: None = None


class ChatMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    """One of the ``n`` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonOut
    stop_reason: StopReason


class ChatCompletion(BaseModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int = Field(description="Seconds since 1970.")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: Literal["default"] | None = None
    system_fingerprint: str | None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(BaseModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """News of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReasonOut | None
    stop_reason: StopReason = None


class ChatChunk(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
