"""Chats on their way to a prompt: checks of the messages, and the template that renders them.

A template is part of the checkpoint and runs in the sandbox of ``transformers``. Everything it sees is rebuilt here
from plain JSON types, so a message cannot bring an object with it. Whatever a template raises is the caller's error,
with the template's own message.

Pure functions: any thread may call them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gapless.errors import RequestError, shown
from gapless.text.validation import check_text

__all__ = ["CHATML_TEMPLATE", "ROLES", "JsonValue", "Message", "checked_messages", "checked_value", "render_template"]

Message = Mapping[str, Any]
JsonValue = Any  # None, bool, int, float, str, and lists and string-keyed dicts of them

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

CHATML_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Names a request may not set as template variables: what the renderer or the sandbox means by them is not the caller's.
_RESERVED_VARIABLES: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversations",
        "messages",
        "return_assistant_tokens_mask",
        "tools",
    }
)
_MAX_DEPTH = 64


def checked_messages(messages: object) -> list[dict[str, JsonValue]]:
    """Return a copy of a chat in plain types, with content parts joined and absent values left out.

    A list of text parts (``[{"type": "text", "text": ...}, ...]``) becomes one string, its parts joined by newlines:
    most templates know only strings, and the newline keeps two parts from forming a control token between them.

    Args:
        messages: a list of mappings with a known ``role`` and a ``content``; an assistant message may go without
            content (it may hold tool calls instead).

    Raises:
        RequestError: naming the message and field: no message at all, an unknown role, no content, a part that is not
            text, a lone surrogate, a value that JSON does not have.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"messages={shown(messages)} must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return [_checked_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def checked_value(value: object, *, field: str, depth: int = 0) -> JsonValue:
    """Return a copy of a JSON-like value in plain types; :class:`RequestError` for anything else."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{field} is nested more than {_MAX_DEPTH} deep; flatten it")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(check_text(value, field=field))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RequestError(f"{field}={float(value)} must be a finite number")
        return float(value)
    if isinstance(value, Mapping):
        return {
            check_text(key, field=f"a key of {field}"): checked_value(item, field=f"{field}.{key}", depth=depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [checked_value(item, field=f"{field}[{i}]", depth=depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{field}={shown(value)} must be a JSON value, not {type(value).__name__}")


def render_template(
    template: str,
    messages: list[dict[str, JsonValue]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[JsonValue] | None,
    variables: Mapping[str, JsonValue],
) -> str:
    """Render a chat template.

    Args:
        template: Jinja source, as models ship it.
        messages: from :func:`checked_messages`.
        add_generation_prompt: end with the header of an assistant message.
        continue_final_message: end inside the last message instead of closing it.
        tools: JSON schemas of functions the model may call.
        variables: further variables the template sees (``bos_token``, ``enable_thinking``, ...).

    Raises:
        RequestError: if both ways to end are asked for, a variable's name is taken, or the template fails or refuses.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError("add_generation_prompt and continue_final_message cannot both be true; turn one of them off")
    taken = sorted(_RESERVED_VARIABLES & variables.keys())
    if taken:
        raise RequestError(f"template variable {taken[0]!r} is set by gapless; remove it")
    if template == CHATML_TEMPLATE and not continue_final_message and all("content" in message for message in messages):
        return _render_chatml(messages, add_generation_prompt=add_generation_prompt)
    # Imported where it is used: it takes half a second, and plain prompts and our own template do without.
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
    except Exception as error:  # a template may raise anything: it is a program out of the checkpoint
        raise RequestError(f"the chat template failed on these messages: {type(error).__name__}: {error}") from error
    text: str = rendered[0]
    return text


def _render_chatml(messages: Sequence[Mapping[str, JsonValue]], *, add_generation_prompt: bool) -> str:
    """Render messages, all with content, as :data:`CHATML_TEMPLATE` does, without a template engine to start."""
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _checked_message(message: object, field: str) -> dict[str, JsonValue]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{field}={shown(message)} must be a mapping with role and content")
    plain = {
        check_text(key, field=f"a key of {field}"): checked_value(value, field=f"{field}.{key}")
        for key, value in message.items()
        if value is not None  # templates test for presence, and would print "None"
    }
    role = plain.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{field}.role={shown(role)} is unknown; use one of {', '.join(sorted(ROLES))}")
    if "content" in plain:
        plain["content"] = _joined_content(plain["content"], f"{field}.content")
    elif role != "assistant":
        raise RequestError(f"{field} has no content; give a string")
    return plain


def _joined_content(content: JsonValue, field: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{field}={shown(content)} must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{field}[{index}]={shown(part)} is not a text part {{"type": "text", "text": ...}}')
        texts.append(part["text"])
    return "\n".join(texts)
