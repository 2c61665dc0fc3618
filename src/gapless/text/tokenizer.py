"""The tokenizer of a checkpoint: :func:`load_tokenizer`, and :class:`Tokenizer`, what it returns.

Loading reads files and takes up to seconds; it happens once, in the thread that starts an engine. Python code that
comes with a checkpoint is never run.
"""

from pathlib import Path
from typing import Any, Final

from gapless.errors import CheckpointError
from gapless.model.checkpoint import TokenizerSource
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.byte_tokenizer import ByteTokenizer
from gapless.text.fast_tokenizer import FastTokenizer

__all__ = ["Tokenizer", "load_tokenizer"]

# Any of these makes a tokenizer; without one, transformers would build an empty tokenizer from config.json alone.
_VOCABULARY_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")


def load_tokenizer(source: TokenizerSource, *, vocab_size: int, chat_template: str | None = None) -> Tokenizer:
    """Load the tokenizer that a checkpoint names.

    Args:
        source: where it is; its ``eos_token_id`` wins over the tokenizer's own.
        vocab_size: rows of the model's embedding.
        chat_template: Jinja source, or the name of one of the checkpoint's templates, instead of its default.

    Raises:
        CheckpointError: if the files are missing or cannot be read.
        ConfigError: if the vocabulary is too small for the byte tokenizer.
    """
    if source.kind == "bytes":
        return ByteTokenizer(vocab_size=vocab_size, eos_token_id=source.eos_token_id, chat_template=chat_template)
    assert source.path is not None, source
    return FastTokenizer(
        _from_gguf(source.path) if source.kind == "gguf" else _from_folder(source.path),
        vocab_size=vocab_size,
        eos_token_id=source.eos_token_id,
        chat_template=chat_template,
    )


def _from_folder(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise CheckpointError(f"{folder} has no tokenizer: none of {', '.join(_VOCABULARY_FILES)} is there; add it")
    return _load(folder, folder)


def _from_gguf(file: Path) -> Any:
    return _load(file, file.parent, gguf_file=file.name)


def _load(shown: Path, folder: Path, **options: str) -> Any:
    # Imported where it is used: it takes half a second, and the byte tokenizer does without.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # A GGUF file describes its tokenizer completely. AutoTokenizer would read all of its metadata a second time, to
    # choose a class that makes the same tokenizer of it (4.3 instead of 0.4 s for 49,152 tokens).
    make = PreTrainedTokenizerFast if "gguf_file" in options else AutoTokenizer
    try:
        tokenizer = make.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # parsers of many formats: each fails in its own way, and all mean a bad checkpoint
        raise CheckpointError(f"the tokenizer of {shown} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"the tokenizer of {shown} is a {type(tokenizer).__name__}, which has no fast form; "
            "convert it to a tokenizer.json"
        )
    return tokenizer
