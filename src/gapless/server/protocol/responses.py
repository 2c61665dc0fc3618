"""``/v1/responses`` on the wire: text in, text out. Nothing is stored, so a response cannot be fetched or continued."""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from gapless.server.protocol.chat import TextFormat, TokenLogprob
from gapless.server.protocol.fields import (
    AtMost,
    JsonList,
    JsonObject,
    Metadata,
    ModelName,
    Only,
    RequestModel,
    ServiceTier,
    Unsupported,
)
from gapless.server.protocol.sampling import SamplingFields

__all__ = [
    "LOGPROBS_INCLUDE",
    "IncompleteDetails",
    "OutputMessage",
    "OutputText",
    "Response",
    "ResponseError",
    "ResponseEvent",
    "ResponseRequest",
    "ResponseUsage",
]

LOGPROBS_INCLUDE: Final = "message.output_text.logprobs"
_PART = {
    "type": "object",
    "properties": {
        "type": {"enum": ["input_text", "output_text"]},
        "text": {"type": "string"},
        "annotations": {"type": "array"},
        "logprobs": {"type": "array"},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["assistant", "developer", "system", "user"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        "id": {"type": "string"},
        "status": {"type": "string"},
        "phase": {"type": "string"},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_Input = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM, "minItems": 1}]})
]
_NOTHING_IS_STORED = "nothing is stored"


class ResponseTextConfig(RequestModel):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Only("medium")] = None


class ReasoningConfig(RequestModel):
    """How much to think first: not at all."""

    effort: Annotated[Any, Only("none")] = None
    summary: Unsupported = None
    generate_summary: Unsupported = None


class ResponseStreamOptions(RequestModel):
    """What a stream holds beside the text."""

    include_obfuscation: bool | None = Field(None, description="Taken and not used: events are never padded.")


class ResponseRequest(SamplingFields):
    """Something to be answered."""

    model: ModelName = None
    input: _Input = Field(description="A text, or messages.")
    instructions: str | None = Field(None, description="A system message that comes first.")
    max_output_tokens: int | None = Field(
        None, json_schema_extra={"minimum": 0}, description="The rest of the context by default."
    )
    include: Annotated[list[Annotated[Any, Only(LOGPROBS_INCLUDE)]], AtMost(16)] | None = None
    top_logprobs: int | None = Field(
        None, json_schema_extra={"minimum": 0, "maximum": 20}, description=f"Only with `{LOGPROBS_INCLUDE}` included."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with `stream`.")
    text: ResponseTextConfig | None = None
    chat_template_kwargs: JsonObject | None = Field(None, description="Variables of the chat template.")

    metadata: Metadata = None
    user: str | None = Field(None, description="Given back and not used.")
    safety_identifier: str | None = Field(None, description="Taken and not used.")
    prompt_cache_key: str | None = Field(None, description="Taken and not used: equal prefixes are always found.")
    parallel_tool_calls: bool | None = Field(None, description="Taken and not used.")
    service_tier: ServiceTier = None
    truncation: Annotated[Any, Only("disabled", because="a prompt is never cut")] = None
    tools: Annotated[Any, Only([], because="there are no tool calls")] = None
    tool_choice: Annotated[Any, Only("none", "auto", because="there are no tool calls")] = None
    store: Annotated[Any, Only(False, because=_NOTHING_IS_STORED)] = None
    background: Annotated[Any, Only(False, because=_NOTHING_IS_STORED)] = None
    previous_response_id: Annotated[Any, Only(because=_NOTHING_IS_STORED)] = None
    conversation: Annotated[Any, Only(because=_NOTHING_IS_STORED)] = None
    prompt: Annotated[Any, Only(because=_NOTHING_IS_STORED)] = None
    reasoning: ReasoningConfig | None = None
    prompt_cache_retention: Annotated[Any, Only("in_memory")] = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_options: Unsupported = None
    context_management: Unsupported = None
    background_options: Unsupported = None
    access_programs: Unsupported = None
    image: Unsupported = None


class OutputText(BaseModel):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: JsonList
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """An answer."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class ResponseError(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(BaseModel):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(BaseModel):
    """More about the input."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """More about the output."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """How many tokens a response took."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(BaseModel):
    """An answer and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Seconds since 1970.")
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    service_tier: Literal["default"] | None
    store: Literal[False]
    background: Literal[False]
    temperature: float
    text: JsonObject
    tool_choice: Literal["none", "auto"]
    tools: JsonList
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(BaseModel):
    """One event of a stream; the other fields depend on its type."""

    type: str
    sequence_number: int
