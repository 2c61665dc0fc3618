"""From a request to prompts: :class:`ChatPrompter` for conversations, :func:`completion_prompts` for the rest.

What takes long (templates, tokenising long text) happens in threads, all of it before anything is queued. Messages
name the field of the request. Belongs to the event loop.

To tokenise a text takes 80 to 190 bytes for each byte of it, however many tokens it has. So what is far too long is
found out before: by its tokens, counted in pieces, which takes little memory. Prose that fits is spared the counting,
since samples of it say already that it is not far too long, and is tokenised once. What is left costs at most 2 KiB for
each token of the context, which is less than most models' KV cache does, unless a token has more than 8 characters.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from gapless.errors import PromptTooLongError, RequestError, shown
from gapless.prompts import PreparedPrompt, prepare_prompt
from gapless.server.endpoints.limited_threads import LimitedThreads
from gapless.text.long_texts import counted_tokens, estimated_tokens
from gapless.text.tokenizer import Tokenizer

__all__ = ["MAX_CHOICES_IN_ALL", "MAX_RENDERED_CHARACTERS", "ChatPrompter", "completion_prompts"]

MAX_CHOICES_IN_ALL: Final = 2048
"""Most choices of one request: its prompts times ``n``."""
MAX_RENDERED_CHARACTERS: Final = 1 << 24
# Shorter text is tokenised in well under a millisecond, less than a thread's hand-over costs under load.
_LONG_TEXT: Final = 4096
_LONG_CONVERSATION: Final = 1 << 17
# Up to here the message that a text is too long says how long it is, whatever the context holds.
_COUNTED_TOKENS: Final = 1 << 16
# Prose has four or five, source code three. A text with more is counted first: what it costs is its characters.
_USUAL_CHARACTERS_PER_TOKEN: Final = 8


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
            text = chat.text()
            if len(text) > self._max_rendered_characters:
                raise PromptTooLongError(
                    f"{field} makes a prompt of {len(text)} characters by the chat template; "
                    f"at most {self._max_rendered_characters} are allowed: shorten it"
                )
            _check_text(text, self._tokenizer, self._max_model_len, field)
            return chat.token_ids()

        is_long = _num_characters(*messages, template_variables) > _LONG_CONVERSATION
        threads = self._threads_of_long if is_long else self._threads
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
        for item, field in zip(items, fields, strict=True):
            if isinstance(item, str):
                _check_text(item, tokenizer, max_model_len, field)
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


def _check_text(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Refuse a text that is far too long before all of it is tokenised."""
    far_too_many = 2 * max_model_len
    most = max(far_too_many, _COUNTED_TOKENS)
    if len(text) <= most:
        return
    is_usual = len(text) <= _USUAL_CHARACTERS_PER_TOKEN * max_model_len
    if is_usual and estimated_tokens(text, tokenizer, field=field) <= far_too_many:
        return
    count = counted_tokens(text, tokenizer, most=most, field=field)
    if count > far_too_many:
        told = f"more than {most}" if count > most else f"about {count}"
        raise PromptTooLongError(f"{field} has {told} tokens and the context holds {max_model_len}: shorten it")


def _check_length(token_ids: Sequence[int], max_model_len: int, field: str) -> None:
    if len(token_ids) > max_model_len:
        raise PromptTooLongError(
            f"{field} has {len(token_ids)} tokens and the context holds {max_model_len}: shorten it"
        )


def _num_characters(*values: object) -> int:
    """About how much text JSON values have, counted until it is long; they have not been checked yet."""
    total = 0
    waiting = list(values)
    while waiting and total <= _LONG_CONVERSATION:
        value = waiting.pop()
        total += 1
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
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
