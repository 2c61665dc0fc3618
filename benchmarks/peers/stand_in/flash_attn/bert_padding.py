"""The functions for padded batches that transformers imports along. Continuous batching has no padded batches."""

from typing import NoReturn

__all__ = ["pad_input", "unpad_input"]


def pad_input(*args: object, **options: object) -> NoReturn:
    """Refuse."""
    raise RuntimeError("the stand-in for flash-attn serves continuous batching only, which pads nothing")


unpad_input = pad_input
