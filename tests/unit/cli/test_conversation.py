"""A talk is kept within the context."""

import pytest

from gapless.cli.conversation import Conversation
from gapless.errors import RequestError
from gapless.text.byte_tokenizer import ByteTokenizer


def make(*, system: str | None = None, max_model_len: int = 200, max_answer: int | None = 20) -> Conversation:
    return Conversation(ByteTokenizer(), system=system, max_model_len=max_model_len, max_answer=max_answer)


def test_a_question_without_an_answer_is_taken_back() -> None:
    talk = make()
    talk.ask("one")
    talk.answer("")
    assert talk.messages == []
    talk.ask("two")
    talk.answer("three")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]


def test_trimming_keeps_the_system_message_and_pairs() -> None:
    talk = make(system="be kind")
    for index in range(4):
        talk.ask(f"{index}" * 20)
        assert talk.trim() in {0, 2}
        talk.answer(f"{index}" * 20)
    messages = talk.messages
    assert messages[0] == {"role": "system", "content": "be kind"}
    assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * ((len(messages) - 1) // 2)
    assert messages[-1]["content"] == "3" * 20
    assert len(messages) < 9
    talk.reset()
    assert talk.messages == messages[:1]


def test_room_is_kept_for_the_answer_but_not_more_than_a_quarter() -> None:
    tokens = len(ByteTokenizer().encode_chat([{"role": "user", "content": "x" * 100}]))
    for max_answer, limit in ((20, tokens + 20), (10_000, tokens * 4 // 3 + 1), (None, tokens * 4 // 3 + 1)):
        fits = make(max_model_len=limit, max_answer=max_answer)
        fits.ask("x" * 100)
        assert fits.trim() == 0
        tight = make(max_model_len=limit - 2, max_answer=max_answer)
        tight.ask("x" * 100)
        with pytest.raises(RequestError, match="shorten it"):
            tight.trim()
