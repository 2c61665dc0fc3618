"""What callers hand in, brought into one form: :func:`prompt_list`, :func:`prepare_prompt`, :func:`params_list`.

A prompt is text, a list of token ids, or a mapping that names which of them it is. Pure functions, called in the
caller's thread before anything is queued; messages name the item of a list (``prompts[3]``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeAlias, TypedDict

from gapless.errors import RequestError, shown
from gapless.sampling_params import SamplingParams
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.validation import check_text, check_token_ids

__all__ = [
    "PreparedPrompt",
    "Prompt",
    "PromptMapping",
    "is_long_prompt",
    "is_single_prompt",
    "params_list",
    "prepare_prompt",
    "prompt_list",
]


class PromptMapping(TypedDict, total=False):
    """A prompt by name. With both, the ids are used and the text is only reported back.

    Attributes:
        prompt: text, tokenised as the model's tokenizer wants it.
        prompt_token_ids: ids, taken as they are.
        cache_salt: requests share cached prompt blocks only under equal salts.
    """

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str


# Characters or ids. Shorter prompts take well under a millisecond, less than a thread's hand-over costs under load.
_LONG_PROMPT_ITEMS = 4096

Prompt: TypeAlias = str | Sequence[int] | PromptMapping


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedPrompt:
    """A checked prompt: its text if it had any, and its ids, at least one, all inside the vocabulary."""

    text: str | None
    token_ids: list[int]
    salt: bytes = b""


def is_single_prompt(prompts: object) -> bool:
    """Whether this is one prompt (text, a mapping, token ids) and not a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], Integral)


def is_long_prompt(prompt: object) -> bool:
    """Whether a prompt takes so long to check and tokenise that it should not be done in an event loop."""
    parts = (prompt.get("prompt"), prompt.get("prompt_token_ids")) if isinstance(prompt, Mapping) else (prompt,)
    return any(isinstance(part, Sequence) and len(part) > _LONG_PROMPT_ITEMS for part in parts)


def prompt_list(prompts: object) -> list[object]:
    """Return the items of a list of prompts.

    Raises:
        RequestError: it is neither a prompt nor a list.
    """
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts={shown(prompts)} must be a string, a list of token ids, a mapping with 'prompt' or "
            f"'prompt_token_ids', or a list of these, not {type(prompts).__name__}"
        )
    return list(prompts)


def prepare_prompt(prompt: object, tokenizer: Tokenizer, *, field: str = "prompt") -> PreparedPrompt:
    """Check a prompt and tokenise it if it is text.

    Args:
        prompt: any of :data:`Prompt`.
        tokenizer: of the model.
        field: the prompt's name in messages.

    Raises:
        RequestError: not a prompt, no token in it, or an id that the model does not have.
    """
    if isinstance(prompt, str):
        return PreparedPrompt(text=prompt, token_ids=tokenizer.encode_prompt(prompt, field=field))
    if isinstance(prompt, Mapping):
        return _prepare_mapping(prompt, tokenizer, field)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        return PreparedPrompt(text=None, token_ids=check_token_ids(prompt, tokenizer.vocab_size, field))
    raise RequestError(
        f"{field}={shown(prompt)} must be a string, a list of token ids, or a mapping with 'prompt' or "
        f"'prompt_token_ids', not {type(prompt).__name__}"
    )


def params_list(params: object, num_prompts: int) -> list[SamplingParams]:
    """Return one :class:`SamplingParams` for each prompt.

    Args:
        params: ``None`` for the defaults, one object for all prompts, or a list with one for each.
        num_prompts: how many there must be.

    Raises:
        RequestError: another type, or another number.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if isinstance(params, str | bytes) or not isinstance(params, Sequence):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, not {type(params).__name__}")
    if len(params) != num_prompts:
        raise RequestError(
            f"sampling_params has {len(params)} items for {num_prompts} prompts: give one for each prompt, or one "
            "object for all"
        )
    for index, item in enumerate(params):
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling_params[{index}] must be SamplingParams, not {type(item).__name__}")
    return list(params)


def _prepare_mapping(prompt: Mapping[object, object], tokenizer: Tokenizer, field: str) -> PreparedPrompt:
    unknown = [key for key in prompt if key not in PromptMapping.__annotations__]
    if unknown:
        raise RequestError(
            f"{field} has the unknown key {shown(unknown[0])}; the keys are {', '.join(PromptMapping.__annotations__)}"
        )
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and ids is None:
        raise RequestError(f"{field} has neither 'prompt' nor 'prompt_token_ids'; give one of them")
    if text is not None:
        text = check_text(text, field=f"{field}.prompt")
    if ids is not None:
        token_ids = check_token_ids(ids, tokenizer.vocab_size, f"{field}.prompt_token_ids")
    else:
        assert text is not None
        token_ids = tokenizer.encode_prompt(text, field=f"{field}.prompt")
    salted = b"" if salt is None else check_text(salt, field=f"{field}.cache_salt").encode()
    return PreparedPrompt(text=text, token_ids=token_ids, salt=salted)
