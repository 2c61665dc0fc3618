"""Reading ``config.json`` and its like as data: bounded, strict, and without running code from the folder.

``transformers`` builds the configuration from a dictionary that was read here. It is never given the folder, so it
looks at no other file and no hub, and code that the folder's ``auto_map`` names cannot be imported: a model type that
``transformers`` ships itself is loaded with that implementation and ``auto_map`` is dropped, any other is refused.
Pure functions; any thread.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.errors import CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["build_config", "eos_ids_of", "parse_json_object", "read_json_object"]

MAX_JSON_BYTES = 64 << 20
# Keys by which a file could choose how transformers runs a model or where it looks for code.
_STEERING_KEYS = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "name_or_path")
# Bounds on sizes that a configuration class may turn into lists before anyone looks at them.
_SIZE_LIMITS = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
}


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing a repeated key: two readers could believe two different values."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def parse_json_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object in which no key occurs twice.

    Args:
        data: UTF-8 bytes.
        what: how errors name the source.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deeply, a duplicate key, or not an object.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_object)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{what} is not valid JSON: {reason}; download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, not an object; download it again")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of at most 64 MiB.

    Raises:
        CheckpointError: the file is missing, not a regular file, too large, or not a JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file; complete the download")
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is {size} bytes, over the limit of {MAX_JSON_BYTES} for a JSON file")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json_object(data, str(path))


def build_config(raw: dict[str, Any], where: str) -> "PretrainedConfig":
    """Build the configuration object of ``raw["model_type"]``.

    Args:
        raw: the file's content; it is not modified.
        where: how errors name the source.

    Raises:
        UnsupportedModelError: the model type is unknown to ``transformers``, or the weights are quantised in a way
            that a folder of safetensors describes in ``quantization_config``.
        CheckpointError: no model type, a size out of bounds, or values that the configuration class refuses.
    """
    # Imported where it is used: with the class of a model it takes more than a second, and presets need neither.
    from transformers import CONFIG_MAPPING, PretrainedConfig

    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(f"{where} has no model_type, so its architecture is unknown; take the model's own config")
    if model_type not in CONFIG_MAPPING:
        code = "; code in a model's folder (auto_map) is never run" if "auto_map" in raw else ""
        raise UnsupportedModelError(f"{where} has model_type {model_type!r}, which transformers does not know{code}")
    if (quantization := raw.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{where} is quantised with {method!r}, which is not supported; take the unquantised model or a GGUF file"
        )
    for key, limit in _SIZE_LIMITS.items():
        value = raw.get(key)
        if value is not None and (type(value) is not int or not 0 < value <= limit):
            raise CheckpointError(f"{where} has {key}={value!r}; it must be a whole number from 1 to {limit}")
    usable = {key: value for key, value in raw.items() if key not in _STEERING_KEYS}
    try:
        config = CONFIG_MAPPING[model_type].from_dict(usable)
    except Exception as error:  # Validation differs by class and version: TypeError, ValueError, KeyError and more.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{where} is refused by transformers' {model_type!r} configuration: {reason}") from error
    assert isinstance(config, PretrainedConfig)
    return config


def eos_ids_of(value: object, vocab_size: int, where: str) -> frozenset[int]:
    """Read an ``eos_token_id`` entry: an int, a list of ints, or null.

    Args:
        value: the entry.
        vocab_size: ids outside ``[0, vocab_size)`` can never be sampled and are left out.
        where: how errors name the source.

    Raises:
        CheckpointError: the entry is of another type.
    """
    if value is None:
        return frozenset()
    ids: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"{where} has eos_token_id={value!r}; it must be an integer, a list of integers, or null")
    return frozenset(token for token in ids if 0 <= token < vocab_size)
