"""A model folder in Hugging Face's layout: ``config.json``, perhaps ``generation_config.json``, and safetensors.

End tokens come from what the files say; the configuration classes have defaults of their own for a file that is
silent, and those would end a generation at an ordinary token.
"""

from pathlib import Path

from gapless.errors import CheckpointError
from gapless.model.checkpoint.base import Checkpoint, LoadFormat, NoWeights, TokenizerSource
from gapless.model.checkpoint.json_files import build_config, eos_ids_of, read_json_object
from gapless.model.checkpoint.presets import BYTES_VOCAB_SIZE
from gapless.model.checkpoint.safetensors_files import open_safetensors

__all__ = ["open_folder"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model")


def open_folder(folder: Path, load_format: LoadFormat) -> Checkpoint:
    """Open a model folder.

    With ``load_format="dummy"`` only ``config.json`` is needed; a folder without tokenizer files then gets the byte
    tokenizer, if the vocabulary has room for it.

    Raises:
        CheckpointError: ``config.json`` or weights are missing or damaged; see :mod:`.safetensors_files` for which
            files count.
        UnsupportedModelError: an unknown architecture, quantised weights, or pickles only.
    """
    config_path = folder / "config.json"
    if not config_path.exists():
        ggufs = sorted(folder.glob("*.gguf"))
        remedy = f"name the file itself: {ggufs[0]}" if ggufs else "complete the download"
        raise CheckpointError(f"{folder} has no config.json; {remedy}")
    raw = read_json_object(config_path)
    config = build_config(raw, str(config_path))
    vocab_size = getattr(config, "vocab_size", 0)

    generation_path = folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.exists() else {}
    eos_ids = eos_ids_of(raw.get("eos_token_id"), vocab_size, str(config_path))
    eos_ids |= eos_ids_of(generation.get("eos_token_id"), vocab_size, str(generation_path))

    source = TokenizerSource(kind="folder", path=folder)
    if load_format == "dummy":
        has_tokenizer = any((folder / name).exists() for name in _TOKENIZER_FILES)
        if not has_tokenizer and vocab_size >= BYTES_VOCAB_SIZE:
            source = TokenizerSource(kind="bytes", path=None)
    return Checkpoint.from_config(
        config,
        generation_config=generation,
        eos_token_ids=eos_ids,
        tokenizer_source=source,
        weights=NoWeights() if load_format == "dummy" else open_safetensors(folder),
    )
