"""The header of a safetensors file, parsed and proven sound by our own code before the library maps the file.

The format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON object of
``name: {dtype, shape, data_offsets}``, then the tensors, back to back without holes. Everything in the header is a
claim by whoever wrote the file, so each one is checked against the file's real size. Pure functions; any thread.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.checkpoint.json_files import parse_json_object

__all__ = ["TensorEntry", "read_safetensors_header"]

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 200_000
_MAX_DIMS = 8

_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor's claim: bytes ``[begin, end)``, counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size as stored."""
        return self.end - self.begin


def read_safetensors_header(path: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one file; no tensor data is read.

    Returns:
        The tensors by name.

    Raises:
        CheckpointError: the file is missing, truncated, longer than its header says, or its header is malformed.
        UnsupportedModelError: a dtype that this reader does not know.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file; complete the download")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is {size} bytes, too short for a safetensors file; download it again")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} claims a header of {length} bytes; the limit is {MAX_HEADER_BYTES}")
            if length > size - 8:
                raise CheckpointError(f"{path} claims a header of {length} bytes but has {size}; download it again")
            raw = parse_json_object(file.read(length), f"the header of {path}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    return _check_entries(raw, path, data_bytes=size - 8 - length)


def _check_entries(raw: dict[str, Any], path: Path, data_bytes: int) -> dict[str, TensorEntry]:
    """Check each claim, and that together they cover the data exactly once."""
    metadata = raw.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise CheckpointError(f"the header of {path} has __metadata__ that is not a map of strings")
    if len(raw) > MAX_TENSORS:
        raise CheckpointError(f"the header of {path} lists {len(raw)} tensors; the limit is {MAX_TENSORS}")
    entries = {name: _check_entry(name, claim, path) for name, claim in raw.items()}

    expected = 0
    for entry in sorted(entries.values(), key=lambda e: (e.begin, e.end)):
        if entry.begin != expected:
            kind = "overlaps the tensor before it" if entry.begin < expected else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {entry.name!r} at byte {entry.begin} {kind} (expected {expected})")
        expected = entry.end
        if expected > data_bytes:
            raise CheckpointError(
                f"{path} is cut short: tensor {entry.name!r} ends at byte {expected} of the data but the file holds "
                f"{data_bytes}; download it again"
            )
    if expected != data_bytes:
        raise CheckpointError(
            f"{path} holds {data_bytes} bytes of data but its header describes {expected}; download it again"
        )
    return entries


def _check_entry(name: str, claim: object, path: Path) -> TensorEntry:
    """Check one tensor's own numbers: known dtype, sane shape, and offsets that match both."""
    if not isinstance(claim, dict):
        raise CheckpointError(f"{path}: the entry of tensor {name!r} is not an object")
    dtype, shape, offsets = claim.get("dtype"), _sizes(claim.get("shape")), _sizes(claim.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if shape is None or len(shape) > _MAX_DIMS:
        raise CheckpointError(f"{path}: tensor {name!r} has the impossible shape {_short(claim.get('shape'))}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {name!r} has impossible offsets {_short(claim.get('data_offsets'))}")
    entry = TensorEntry(name=name, dtype=dtype, shape=shape, begin=offsets[0], end=offsets[1])
    if entry.nbytes != (needed := prod(shape) * _ITEM_BYTES[dtype]):
        raise CheckpointError(f"{path}: tensor {name!r} is {entry.nbytes} bytes; its shape and dtype need {needed}")
    return entry


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Read a list of whole numbers from 0 up to 2**62 (``True`` is not a number); ``None`` if it is something else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value):
        return tuple(value)
    return None


def _short(value: object) -> str:
    """Show a value of unknown size in an error of one line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
