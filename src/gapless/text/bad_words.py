"""Bad words as the token ids that a model would sample: :func:`bad_word_ids`."""

from collections.abc import Sequence

from gapless.text.base_tokenizer import Tokenizer

__all__ = ["bad_word_ids"]


def bad_word_ids(words: Sequence[str | Sequence[int]], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Tokenise the words that are text, as they read at the start of a text and after a space.

    The two readings are often different tokens (``"word"`` and ``" word"``), and both have to be forbidden. Where the
    space is a token of its own, the first reading covers the second.

    Args:
        words: texts, and lists of ids, which are taken as they are.
        tokenizer: of the model.

    Raises:
        RequestError: a text that the tokenizer cannot encode.
    """
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        if not isinstance(word, str):
            found[tuple(word)] = None
            continue
        field = f"bad_words[{index}]"
        start = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False, field=field))
        inside = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False, field=field))
        if start:
            found[start] = None
        if inside and inside[-len(start) :] != start:
            found[inside] = None
    return tuple(found)
