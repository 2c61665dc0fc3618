"""What every tokenizer of gapless does: :class:`Tokenizer`.

The checks and the rules (BOS, empty prompts, chats, typed control text) are written once, here; a subclass knows how
to encode and decode. A tokenizer does not change after it is built, so any thread may use it; encoding long text is
slow and belongs off an event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gapless.errors import RequestError, shown
from gapless.text.chat import JsonValue, Message, checked_messages, checked_value, render_template
from gapless.text.control_text import ControlTextMask, ControlTexts
from gapless.text.stream_decoder import StreamDecoder
from gapless.text.validation import check_text

__all__ = ["RenderedChat", "SpecialSpan", "Tokenizer"]

# Holds the text of any BOS, with white space that the token may swallow.
_START_CHARACTERS: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialSpan:
    """A special token found in a text: ``text[start:end]``, white space that the token swallows included."""

    start: int
    end: int
    token_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedChat:
    """A chat that the template has rendered once.

    Attributes:
        text: makes what :meth:`Tokenizer.render_chat` returns.
        token_ids: makes what :meth:`Tokenizer.encode_chat` returns.
    """

    text: Callable[[], str]
    token_ids: Callable[[], list[int]]


class Tokenizer(ABC):
    """Text to token ids and back, for one model.

    Args:
        vocab_size: rows of the model's embedding. The tokenizer may have fewer ids (an id beyond them decodes to
            nothing) or more (text that needs one of those is refused).
        eos_token_id: the id that ends a text, if there is one.
        bos_token_id: the id that starts a text, if there is one.
        special_tokens: content by id of the special (control) tokens.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_id: int | None,
        bos_token_id: int | None,
        special_tokens: Mapping[int, str],
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_token_id = eos_token_id
        self._bos_token_id = bos_token_id
        self._special_tokens = dict(special_tokens)
        self._special_ids = frozenset(special_tokens)
        self._control_texts = ControlTexts(special_tokens.values())

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return self._vocab_size

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text."""
        return self._eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a text."""
        return self._bos_token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens: those that ``skip_special_tokens`` leaves out."""
        return self._special_ids

    def holds_special_text(self, text: str) -> bool:
        """Whether the text of a special token is part of a text."""
        pattern = self._control_texts.pattern
        return pattern is not None and pattern.search(text) is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        try:
            return self._chat_template(has_tools=False) is not None
        except RequestError:  # several templates, none of them the default
            return False

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "text") -> list[int]:
        """Tokenise a text. The text of a special token in it becomes that token.

        Args:
            text: any text.
            add_special_tokens: add what the tokenizer adds to a text of its own accord (BOS, for some).
            field: the text's name in messages.

        Raises:
            RequestError: if it is not valid text, or needs an id that the model does not have.
        """
        return self._known(self._encode(check_text(text, field=field), add_special_tokens), field)

    def encode_prompt(self, text: str, *, field: str = "prompt") -> list[int]:
        """Tokenise a raw prompt as the tokenizer wants it, with one BOS at most.

        A prompt that starts with the text of BOS (a rendered chat) is not given another. In a list of prompts, pass
        the index in the name: ``field="prompts[3]"``.

        Raises:
            RequestError: as :meth:`encode`, and for a prompt without any token: ``""`` if the tokenizer adds no BOS.
        """
        ids = self.encode(text, field=field)
        if not ids:
            raise RequestError(
                f"{field}={shown(text)} is empty and this tokenizer adds no BOS token; give at least one token"
            )
        bos = self._bos_token_id
        if bos is not None and ids[:2] == [bos, bos] and self._starts_with_bos(text) and self._adds_bos():
            del ids[0]
        return ids

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a list of ids; an id without a token (the padding of a vocabulary) has no text.

        White space is never "cleaned up", whatever the tokenizer's configuration says: that would change text which
        has been given out already.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which need not be valid UTF-8; none for an id without a token.

        Special tokens have the bytes of their text.
        """
        return self.decode([token_id], skip_special_tokens=False).encode()

    @abstractmethod
    def stream_decoder(self, *, skip_special_tokens: bool) -> StreamDecoder:
        """A decoder for one request that gives what :meth:`decode` gives, id by id."""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonValue] | None = None,
        template_variables: Mapping[str, JsonValue] | None = None,
    ) -> str:
        """Render a chat by the model's template.

        Args:
            messages: see :func:`gapless.text.chat.checked_messages`.
            add_generation_prompt: end with the header of the answer.
            continue_final_message: end inside the last message, so that the model goes on with it.
            tools: JSON schemas of functions the model may call.
            template_variables: what else the template should see, such as ``enable_thinking``.

        Raises:
            RequestError: if the model has no template, the template fails or refuses, or the messages are not valid.
        """
        return self._render(
            checked_messages(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=_checked_tools(tools),
            variables=checked_value(template_variables or {}, field="template_variables"),
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonValue] | None = None,
        template_variables: Mapping[str, JsonValue] | None = None,
    ) -> list[int]:
        """Tokenise a chat: the ids of :meth:`render_chat`'s text with nothing added.

        The ids are those of ``apply_chat_template(..., tokenize=True)``, except where a message holds the text of a
        special token: it stays plain text, so a user cannot end the turn by typing ``<|im_end|>``. Added tokens that
        are not special (``<think>``) stay tokens wherever they are.

        Args and errors: as :meth:`render_chat`; also refused is a chat whose ids the model does not have.
        """
        return self.rendered_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_variables=template_variables,
        ).token_ids()

    def rendered_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonValue] | None = None,
        template_variables: Mapping[str, JsonValue] | None = None,
    ) -> "RenderedChat":
        """Render a chat for both its text and its ids; args and errors as :meth:`render_chat`."""
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        mask = ControlTextMask(self._control_texts)
        rendered = self._render(
            [{**mask.mask(message), "role": message["role"]} for message in checked_messages(messages)],
            **how,
            tools=mask.mask(_checked_tools(tools)),
            variables=mask.mask(checked_value(template_variables or {}, field="template_variables")),
        )

        def token_ids() -> list[int]:
            ids = self._encode_masked(rendered, mask) if mask.found else self._encode(rendered, False)
            if not ids:
                raise RequestError("the chat template made an empty prompt of messages; give a message with content")
            return self._known(ids, "messages")

        def text() -> str:
            if not mask.found:
                return rendered
            # A template may look at what a message holds, so the plain text is rendered from the plain messages.
            return self.render_chat(messages, **how, tools=tools, template_variables=template_variables)

        return RenderedChat(text=text, token_ids=token_ids)

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a valid text."""

    @abstractmethod
    def _find_special(self, text: str) -> list[SpecialSpan]:
        """Where :meth:`_encode` finds special tokens in a text, in order."""

    @abstractmethod
    def _encode_plain(self, text: str, *, is_start: bool) -> list[int]:
        """Ids of a text in which nothing is a special token.

        Args:
            text: a stretch of text between two special tokens.
            is_start: whether the stretch starts the prompt (sentencepiece tokenizers may add a space there).
        """

    @abstractmethod
    def _chat_template(self, *, has_tools: bool) -> str | None:
        """The Jinja source for a chat, or ``None``."""

    @abstractmethod
    def _template_variables(self) -> Mapping[str, str]:
        """The variables that templates may expect of the tokenizer, such as ``bos_token``."""

    def _starts_with_bos(self, text: str) -> bool:
        return self._encode(text[:_START_CHARACTERS], False)[:1] == [self._bos_token_id]

    def _adds_bos(self) -> bool:
        return self._encode("", True)[:1] == [self._bos_token_id]

    def _render(
        self,
        messages: list[dict[str, JsonValue]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[JsonValue] | None,
        variables: Mapping[str, JsonValue],
    ) -> str:
        template = self._chat_template(has_tools=tools is not None)
        if template is None:
            raise RequestError(
                "this model has no chat template; send a plain prompt, or load the model with a chat template"
            )
        return render_template(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self._template_variables(), **variables},
        )

    def _encode_masked(self, rendered: str, mask: ControlTextMask) -> list[int]:
        """Special tokens are found while control text is masked; the stretches between them are encoded unmasked."""
        ids: list[int] = []
        position = 0
        for span in self._find_special(rendered):
            ids += self._encode_stretch(rendered[position : span.start], mask, is_start=position == 0)
            ids.append(span.token_id)
            position = span.end
        return ids + self._encode_stretch(rendered[position:], mask, is_start=position == 0)

    def _encode_stretch(self, stretch: str, mask: ControlTextMask, *, is_start: bool) -> list[int]:
        if not stretch:
            return []
        text = mask.unmask(stretch)
        ids = self._encode_plain(text, is_start=is_start)
        typed = mask.control_texts_in(stretch)
        forged = next((token_id for token_id in ids if self._special_tokens.get(token_id) in typed), None)
        if forged is not None:
            raise RequestError(
                f"messages hold the control text {self._special_tokens[forged]!r}, which this tokenizer cannot encode "
                "as plain text; remove it"
            )
        return ids

    def _known(self, ids: list[int], field: str) -> list[int]:
        if ids and max(ids) >= self._vocab_size:
            raise RequestError(
                f"{field} needs token id {max(ids)}, but the model has only {self._vocab_size} ids; rephrase it"
            )
        return ids


def _checked_tools(tools: Sequence[JsonValue] | None) -> list[JsonValue] | None:
    if tools is None:
        return None
    plain = checked_value(tools, field="tools")
    if not isinstance(plain, list) or not all(isinstance(tool, dict) for tool in plain):
        raise RequestError(f"tools={shown(tools)} must be a list of JSON schemas")
    return plain or None
