"""From a request to prompts: :class:`ChatPrompter` for conversations, :func:`completion_prompts` for the rest.

What takes long (templates, tokenising long text) happens in threads, all of it before anything is queued. Messages
name the field of the request. Belongs to the event loop.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from gapless.errors import PromptTooLongError, RequestError, shown
from gapless.prompts import PreparedPrompt, prepare_prompt
from gapless.server.endpoints.limited_threads import LimitedThreads
from gapless.text.tokenizer import Tokenizer

__all__ = ["MAX_CHOICES_IN_ALL", "MAX_RENDERED_CHARACTERS", "ChatPrompter", "completion_prompts"]

MAX_CHOICES_IN_ALL: Final = 2048
"""Most choices of one request: its prompts times ``n``."""
MAX_RENDERED_CHARACTERS: Final = 1 << 24
# Shorter text is tokenised in well under a millisecond, less than a thread's hand-over costs under load.
_LONG_TEXT: Final = 4096
_LONG_CONVERSATION: Final = 1 << 17


class ChatPrompter:
    """Renders and tokenises conversations by the template that the server was started with.

    Args:
        tokenizer: of the model.
        max_model_len: the longest context, in tokens.
        max_rendered_characters: most that a template may make of a conversation.
        threads: where short conversations are rendered; long ones have threads of their own and hold up no other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        max_rendered_characters: int = MAX_RENDERED_CHARACTERS,
        threads: LimitedThreads | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._max_rendered_characters = max_rendered_characters
        self._threads = threads or LimitedThreads()
        self._threads_of_long = LimitedThreads(num_threads=2)

    async def prepare(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_variables: dict[str, Any] | None,
        field: str = "messages",
    ) -> PreparedPrompt:
        """The prompt of a conversation, which is called ``field``.

        Raises:
            RequestError: the messages are not valid, or the template refuses them, takes too long or writes too much.
            PromptTooLongError: it is longer than the context.
        """

        def render_and_encode() -> list[int]:
            chat = self._tokenizer.rendered_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_variables=template_variables,
            )
            num_characters = len(chat.text())
            if num_characters > self._max_rendered_characters:
                raise PromptTooLongError(
                    f"{field} makes a prompt of {num_characters} characters by the chat template; "
                    f"at most {self._max_rendered_characters} are allowed: shorten it"
                )
            return chat.token_ids()

        threads = self._threads if _num_characters(messages) <= _LONG_CONVERSATION else self._threads_of_long
        try:
            token_ids = await threads.run(render_and_encode)
        except TimeoutError:
            raise RequestError(
                f"{field} keeps the chat template busy for more than {threads.limit_s:g} s; shorten it"
            ) from None
        _check_length(token_ids, self._max_model_len, field)
        return PreparedPrompt(text=None, token_ids=token_ids)


async def completion_prompts(
    prompt: object, tokenizer: Tokenizer, *, n: int, add_special_tokens: bool, max_model_len: int
) -> list[PreparedPrompt]:
    """The prompts of a completion: a text, a list of texts, token ids, or a list of lists of them.

    Args:
        prompt: what the request has.
        tokenizer: of the model.
        n: choices for each.
        add_special_tokens: whether the tokenizer may add its BOS to a text.
        max_model_len: the longest context, in tokens.

    Raises:
        RequestError: naming the item.
        PromptTooLongError: one is longer than the context; naming it and both lengths.
    """
    items, fields = _prompt_items(prompt, n)
    for item, field in zip(items, fields, strict=True):
        if isinstance(item, list):  # before each of a million ids is looked at
            _check_length(item, max_model_len, field)

    def prepare() -> list[PreparedPrompt]:
        return [
            _plain(item, tokenizer, field)
            if isinstance(item, str) and not add_special_tokens
            else prepare_prompt(item, tokenizer, field=field)
            for item, field in zip(items, fields, strict=True)
        ]

    prompts = prepare() if sum(map(len, items)) <= _LONG_TEXT else await asyncio.to_thread(prepare)
    for each, field in zip(prompts, fields, strict=True):
        _check_length(each.token_ids, max_model_len, field)
    return prompts


def _check_length(token_ids: Sequence[int], max_model_len: int, field: str) -> None:
    if len(token_ids) > max_model_len:
        raise PromptTooLongError(
            f"{field} has {len(token_ids)} tokens and the context holds {max_model_len}: shorten it"
        )


def _num_characters(messages: Sequence[Any]) -> int:
    """About how much text a conversation has, counted until it is long; it has not been checked yet."""
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else (content,):
            text = part.get("text") if isinstance(part, dict) else part
            total += 1 + (len(text) if isinstance(text, str) else 0)
            if total > _LONG_CONVERSATION:
                return total
    return total


def _prompt_items(prompt: object, n: int) -> tuple[list[Any], list[str]]:
    """The prompts, each a text or a list, and what to call them."""
    if isinstance(prompt, str):
        return [prompt], ["prompt"]
    if not isinstance(prompt, list):
        raise RequestError(
            f"prompt={shown(prompt)} must be a string, a list of strings, token ids, or a list of lists of token ids"
        )
    if not prompt:
        raise RequestError("prompt is an empty list; give at least one prompt")
    if not isinstance(prompt[0], str | list):
        return [prompt], ["prompt"]
    if len(prompt) * n > MAX_CHOICES_IN_ALL:
        raise RequestError(
            f"prompt has {len(prompt)} items, which makes {len(prompt) * n} choices with n={n}; "
            f"at most {MAX_CHOICES_IN_ALL} are allowed"
        )
    kind = type(prompt[0])
    for index, item in enumerate(prompt):
        if not isinstance(item, kind):
            what = "a string" if kind is str else "a list of token ids"
            raise RequestError(f"prompt[{index}]={shown(item)} must be {what}, as the first of the list is")
    return prompt, [f"prompt[{index}]" for index in range(len(prompt))]


def _plain(text: str, tokenizer: Tokenizer, field: str) -> PreparedPrompt:
    ids = tokenizer.encode(text, add_special_tokens=False, field=field)
    if not ids:
        raise RequestError(f"{field}={shown(text)} has no token; give at least one")
    return PreparedPrompt(text=text, token_ids=ids)
