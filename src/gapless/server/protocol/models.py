"""The small endpoints on the wire: models, tokens."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gapless.server.protocol.chat import Messages
from gapless.server.protocol.fields import AtMost, JsonObject, ModelName, RequestModel

__all__ = [
    "DetokenizeRequest",
    "Detokenized",
    "ModelCard",
    "ModelList",
    "TokenizeRequest",
    "Tokenized",
]


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int = Field(description="When the server was started, in seconds since 1970.")
    owned_by: str
    max_model_len: int = Field(description="The longest context of one request, in tokens.")


class ModelList(BaseModel):
    """All models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeRequest(RequestModel):
    """A text or a conversation to be tokenised; one of the two."""

    model: ModelName = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="For a prompt; true by default.")
    add_generation_prompt: bool | None = Field(None, description="For a conversation; true by default.")
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = Field(None, description="Give the text of each token, too.")


class Tokenized(BaseModel):
    """Token ids, those that a request with the same prompt would have."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids to be decoded."""

    model: ModelName = None
    tokens: Annotated[list[int], Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}}), AtMost(1 << 20)]
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out; false by default.")


class Detokenized(BaseModel):
    """The text."""

    prompt: str
