"""Parts of answers that several endpoints have in common."""

from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

__all__ = ["FinishReasonOut", "PromptLogprobs", "PromptTokenLogprob", "PromptTokensDetails", "StopReason", "Usage"]

FinishReasonOut: TypeAlias = Literal["stop", "length"]
StopReason: TypeAlias = int | str | None


class PromptTokensDetails(BaseModel):
    """More about the prompt."""

    cached_tokens: int = Field(description="Those whose keys and values were in the prefix cache.")


class Usage(BaseModel):
    """How many tokens a request took."""

    prompt_tokens: int = Field(description="Counted once, whatever `n` is.")
    completion_tokens: int = Field(description="Of all choices; a token that ended one is counted.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptTokenLogprob(BaseModel):
    """How likely a token of the prompt, or one in its place, was."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs: TypeAlias = list[dict[str, PromptTokenLogprob] | None]
