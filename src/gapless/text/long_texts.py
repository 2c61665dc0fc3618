"""What would take much memory at once, a piece at a time: :func:`counted_tokens`, :func:`decoded_pieces`.

The tokenizers library takes 80 to 190 bytes for each byte of a text that it encodes, and a string for each id that it
decodes. So how long a text is can be counted in pieces, or estimated by samples, before all of it is encoded, and the
text of many ids be had in pieces. The ids of pieces are not those of the whole, where a token may lie across two.

Nothing here owns state; any thread may call it, off an event loop.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Final

from gapless.text.base_tokenizer import Tokenizer

__all__ = [
    "PIECE_CHARACTERS",
    "PIECE_IDS",
    "SAMPLED_CHARACTERS",
    "counted_tokens",
    "decoded_pieces",
    "estimated_tokens",
]

PIECE_CHARACTERS: Final = 16_384
"""How much of a text is encoded at a time to count its tokens."""
PIECE_IDS: Final = 4096
"""How many ids are decoded at a time, in a few milliseconds."""
_NUM_SAMPLES: Final = 16
_SAMPLE_CHARACTERS: Final = 512
SAMPLED_CHARACTERS: Final = _NUM_SAMPLES * _SAMPLE_CHARACTERS
"""How much of a text is encoded to estimate its tokens."""


def counted_tokens(text: str, tokenizer: Tokenizer, *, most: int, field: str = "text") -> int:
    """About how many tokens a text has, counted in pieces; the first count above ``most`` ends it.

    Time and memory are those of about ``most`` tokens. A token may lie across two pieces, so the count can be too high
    by a few in each 16,384 characters.

    Raises:
        RequestError: as :meth:`Tokenizer.encode`, for what is in a piece.
    """
    count = 0
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        count += len(tokenizer.encode(piece, add_special_tokens=False, field=field))
        if count > most:
            break
    return count


def estimated_tokens(text: str, tokenizer: Tokenizer, *, field: str = "text") -> int:
    """About how many tokens a text has, by 16 samples of 512 characters: its cost does not grow with the text.

    There is a sample in each sixteenth of the text, at a place drawn anew each time: nobody can write a text that looks
    short where it is looked at. The tokens of a text of up to 8,192 characters are counted.

    Raises:
        RequestError: as :meth:`Tokenizer.encode`, for what is in a sample.
    """
    if len(text) <= SAMPLED_CHARACTERS:
        return len(tokenizer.encode(text, add_special_tokens=False, field=field))
    part = len(text) // _NUM_SAMPLES
    draw = random.Random()
    starts = [number * part + draw.randint(0, part - _SAMPLE_CHARACTERS) for number in range(_NUM_SAMPLES)]
    samples = [text[start : start + _SAMPLE_CHARACTERS] for start in starts]
    count = sum(len(tokenizer.encode(sample, add_special_tokens=False, field=field)) for sample in samples)
    return count * len(text) // SAMPLED_CHARACTERS


def decoded_pieces(ids: Sequence[int], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> Iterator[str]:
    """The text of many ids in pieces, which join to what :meth:`Tokenizer.decode` gives for all of them.

    There is at least one piece, and any of them may be empty. No more is held than a piece and what is still open at
    its end: a character, or a run of byte tokens.
    """
    decoder = tokenizer.stream_decoder(skip_special_tokens=skip_special_tokens)
    for start in range(0, len(ids), PIECE_IDS):
        yield "".join([text for token_id in ids[start : start + PIECE_IDS] for text in decoder.push(token_id)])
    yield "".join(decoder.rest())
