"""What ``/v1/responses`` takes as input, as the messages of a chat: :func:`messages_of`. Pure functions."""

from typing import Any, Final

from gapless.errors import RequestError, shown
from gapless.server.protocol.responses import ResponseRequest

__all__ = ["messages_of"]

_ROLES: Final = ("assistant", "developer", "system", "user")
# Of messages that the API itself wrote and a client sends back.
_MESSAGE_KEYS: Final = frozenset({"type", "role", "content", "id", "status", "phase"})
_PART_KEYS: Final = frozenset({"type", "text", "annotations", "logprobs"})


def messages_of(body: ResponseRequest) -> list[dict[str, Any]]:
    """The conversation that a request describes, its instructions first.

    Raises:
        RequestError: naming the item.
    """
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*instructions, {"role": "user", "content": body.input}]
    if not isinstance(body.input, list):
        raise RequestError(f"input={shown(body.input)} must be a string or a list of messages")
    if not body.input:
        raise RequestError("input is an empty list; give at least one message")
    return [*instructions, *(_message(item, f"input[{index}]") for index, item in enumerate(body.input))]


def _message(item: object, field: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise RequestError(f"{field}={shown(item)} must be a message with role and content")
    if item.get("type", "message") != "message":
        raise RequestError(f"{field}.type={shown(item['type'])} is not supported; there are only messages")
    unknown = sorted(item.keys() - _MESSAGE_KEYS)
    if unknown:
        raise RequestError(f"{field} has the unknown key {shown(unknown[0])}; remove it")
    if item.get("role") not in _ROLES:
        raise RequestError(f"{field}.role={shown(item.get('role'))} is unknown; use one of {', '.join(_ROLES)}")
    return {"role": item["role"], "content": _content(item.get("content"), f"{field}.content")}


def _content(content: object, field: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{field}={shown(content)} must be a string or a list of text parts")
    return [{"type": "text", "text": _text(part, f"{field}[{index}]")} for index, part in enumerate(content)]


def _text(part: object, field: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text"):
        kind = part.get("type") if isinstance(part, dict) else part
        raise RequestError(f"{field}.type={shown(kind)} is not supported; use input_text or output_text")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{field}.text={shown(part.get('text'))} must be a string")
    unknown = sorted(part.keys() - _PART_KEYS)
    if unknown:
        raise RequestError(f"{field} has the unknown key {shown(unknown[0])}; remove it")
    return str(part["text"])
