"""Long lists of ids and long texts: what they cost, and that nothing of it changes an id, a text or a verdict."""

import asyncio
import http.client
import re
from collections.abc import Iterator

import pytest

from fixtures.api_server import ApiServer
from gapless.errors import PromptTooLongError
from gapless.server.endpoints import tokens
from gapless.server.endpoints.prompting import ChatPrompter, completion_prompts
from gapless.text.byte_tokenizer import ByteTokenizer
from gapless.text.long_texts import (
    PIECE_CHARACTERS,
    PIECE_IDS,
    SAMPLED_CHARACTERS,
    counted_tokens,
    estimated_tokens,
)

CONTEXT = 40_000
# Shorter texts are tokenised without a look at them.
UNSEEN = 2 * CONTEXT
# Of prose, for each token of the context.
USUAL = 8

# Halves of characters, bytes that are none, a special token and an id without a token.
IDS = [*'\N{GRINNING FACE}é "\\\x07'.encode(), 0xFF, 257, 300, 0xF0, 0x9F]


@pytest.mark.parametrize("count", [PIECE_IDS, PIECE_IDS + 1, 5 * PIECE_IDS])
@pytest.mark.parametrize("without_special", [False, True])
def test_many_ids_have_the_text_that_they_have_at_once(server: ApiServer, count: int, without_special: bool) -> None:
    assert server.context is not None
    ids = (IDS * (count // len(IDS) + 1))[:count]
    text = server.context.client.tokenizer.decode(ids, skip_special_tokens=without_special)
    assert server.ok("/detokenize", tokens=ids, skip_special_tokens=without_special) == {"prompt": text}


def test_a_wrong_one_of_many_ids_is_named(server: ApiServer) -> None:
    reply = server.post("/detokenize", tokens=[97] * 9000 + [320])
    assert reply.status == 400
    assert reply.error["param"] == "tokens[9000]"
    assert reply.error["message"] == "tokens[9000]=320 is not in the vocabulary; ids go from 0 to 319"


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_a_fault_while_many_ids_are_decoded_never_looks_like_a_text(
    server: ApiServer, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first piece it is an error as any other; after it the answer stays incomplete."""

    def failing(*_: object, **__: object) -> Iterator[str]:
        yield from ["a"] * num_pieces
        raise RuntimeError

    monkeypatch.setattr(tokens, "decoded_pieces", failing)
    fields = {"tokens": [97] * (PIECE_IDS + 1)}
    if num_pieces:
        with pytest.raises(http.client.IncompleteRead):
            server.post("/detokenize", **fields)
    else:
        reply = server.post("/detokenize", **fields)
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
    monkeypatch.undo()
    assert server.ok("/detokenize", **fields) == {"prompt": "a" * (PIECE_IDS + 1)}


# --- long texts -------------------------------------------------------------------------------------------------------


class Prose(ByteTokenizer):
    """A token for each five characters, however the text is cut, but one for each digit; counts what it has read."""

    def __init__(self) -> None:
        super().__init__(chat_template="{{ messages[0].content }}")
        self.num_read = 0

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.num_read += len(text)
        num_digits = text.count("0")
        return [48] * num_digits + [97] * (-(-(len(text) - num_digits) // 5))


def prompt_ids(text: str, tokenizer: Prose) -> list[int]:
    coroutine = completion_prompts(text, tokenizer, n=1, add_special_tokens=True, max_model_len=CONTEXT)
    [prompt] = asyncio.run(coroutine)
    return prompt.token_ids


@pytest.mark.parametrize("is_chat", [False, True])
def test_prose_that_fits_is_tokenised_once(is_chat: bool) -> None:
    text = "word " * (CONTEXT - 1)
    assert UNSEEN < len(text) < USUAL * CONTEXT
    tokenizer = Prose()
    if is_chat:
        prompter = ChatPrompter(tokenizer, max_model_len=CONTEXT)
        how = {"add_generation_prompt": True, "continue_final_message": False, "template_variables": None}
        ids = asyncio.run(prompter.prepare([{"role": "user", "content": text}], **how)).token_ids
    else:
        ids = prompt_ids(text, tokenizer)
    assert len(ids) == CONTEXT - 1
    assert len(text) <= tokenizer.num_read <= len(text) + SAMPLED_CHARACTERS


def test_a_text_that_is_far_too_long_is_not_tokenised_to_its_end() -> None:
    tokenizer = Prose()
    with pytest.raises(PromptTooLongError, match=f"^prompt has more than {UNSEEN} tokens .* holds {CONTEXT}: shorten"):
        prompt_ids("0" * (USUAL * CONTEXT), tokenizer)
    assert tokenizer.num_read <= UNSEEN + SAMPLED_CHARACTERS + PIECE_CHARACTERS


def test_a_long_text_for_a_short_context_is_never_tokenised_as_a_whole() -> None:
    """Its length is told all the same."""
    tokenizer = Prose()
    text = "word " * 20_000
    longest = 0
    encode = tokenizer._encode

    def watched(text: str, add_special_tokens: bool) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(text, add_special_tokens)

    tokenizer._encode = watched  # type: ignore[method-assign]
    with pytest.raises(PromptTooLongError) as told:
        asyncio.run(completion_prompts(text, tokenizer, n=1, add_special_tokens=True, max_model_len=4096))
    found = re.fullmatch(r"prompt has about (\d+) tokens and the context holds 4096: shorten it", str(told.value))
    assert found is not None
    assert int(found[1]) == pytest.approx(20_000, abs=len(text) // PIECE_CHARACTERS + 1)
    assert longest <= PIECE_CHARACTERS


@pytest.mark.parametrize("num_digits", [0, 1000, 20_000, 30_000, 60_000, 90_000])
@pytest.mark.parametrize("num_others", [81_000, 150_000, 250_000, 500_000])
@pytest.mark.parametrize("at_end", [False, True])
def test_wherever_its_tokens_are_only_their_number_decides(num_digits: int, num_others: int, at_end: bool) -> None:
    digits, others = "0" * num_digits, "a" * num_others
    text = others + digits if at_end else digits + others
    num_tokens = num_digits + num_others // 5
    if num_tokens <= CONTEXT:
        assert len(prompt_ids(text, Prose())) == num_tokens
    else:
        with pytest.raises(PromptTooLongError, match=rf"prompt has (more than {UNSEEN}|about \d+|{num_tokens}) tokens"):
            prompt_ids(text, Prose())


def test_the_length_of_a_text_is_about_what_samples_say() -> None:
    even = "0aaaa" * 40_000
    tokenizer = Prose()
    estimate = estimated_tokens(even, tokenizer)
    assert tokenizer.num_read == SAMPLED_CHARACTERS
    assert estimate == pytest.approx(len(tokenizer._encode(even, False)), rel=0.05)
    assert estimated_tokens("0" * 5000, tokenizer) == 5000
    # Half of it has tokens: of sixteen samples so do eight.
    uneven = "0" * 100_000 + "a" * 100_000
    assert estimated_tokens(uneven, tokenizer) == pytest.approx(120_000, rel=0.1)


def test_a_count_ends_soon_above_the_most() -> None:
    tokenizer = Prose()
    assert counted_tokens("0" * 100_000, tokenizer, most=100_000) == 100_000
    tokenizer.num_read = 0
    assert 20_000 < counted_tokens("0" * 100_000, tokenizer, most=20_000) <= 20_000 + PIECE_CHARACTERS
    assert tokenizer.num_read <= 20_000 + PIECE_CHARACTERS
