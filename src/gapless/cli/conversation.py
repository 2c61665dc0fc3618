"""The messages of a talk, kept short enough for the model's context: :class:`Conversation`."""

from typing import TYPE_CHECKING

from gapless.errors import RequestError

if TYPE_CHECKING:
    from gapless.text.base_tokenizer import Tokenizer

__all__ = ["Conversation"]

_MAX_RESERVED_SHARE = 0.25


class Conversation:
    """What was said, oldest first, after an optional system message.

    Args:
        tokenizer: counts tokens.
        system: instructions that are never forgotten.
        max_model_len: tokens of the context.
        max_answer: most tokens of an answer; room is kept for it, though never more than a quarter of the context.
    """

    def __init__(
        self, tokenizer: "Tokenizer", *, system: str | None, max_model_len: int, max_answer: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._said: list[dict[str, str]] = []
        reserved = int(max_model_len * _MAX_RESERVED_SHARE)
        self._limit = max_model_len - (reserved if max_answer is None else min(reserved, max_answer))

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, the system message first."""
        return [*self._system, *self._said]

    def reset(self) -> None:
        """Forget all but the system message."""
        self._said.clear()

    def ask(self, text: str) -> None:
        """Add the user's message."""
        self._said.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the model's answer; without one, the question is taken back, since two in a row confuse templates."""
        if text:
            self._said.append({"role": "assistant", "content": text})
        else:
            self._said.pop()

    def trim(self) -> int:
        """Forget the oldest questions, with their answers, until the rest fits; return how many messages that were.

        Raises:
            RequestError: the last message alone does not fit, or the template refuses the messages.
        """
        num_forgotten = 0
        while (num_tokens := len(self._tokenizer.encode_chat(self.messages))) > self._limit:
            if len(self._said) <= 2:
                raise RequestError(
                    f"the message makes a prompt of {num_tokens} tokens, and {self._limit} are left beside the answer: "
                    "shorten it"
                )
            del self._said[:2]
            num_forgotten += 2
        return num_forgotten
