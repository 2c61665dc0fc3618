"""The header of a GGUF file, parsed and proven sound by our own code before anything is allocated for it.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, counts, typed metadata, tensor
infos, then aligned tensor data. Every length in it is a claim by whoever wrote the file; each is checked against what
the file really holds before it is used, and strings of long arrays (vocabularies) are walked but not kept.
Pure functions; any thread.
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gapless.errors import CheckpointError, UnsupportedModelError

__all__ = ["GgufArray", "GgufHeader", "GgufTensorInfo", "GgufValue", "read_gguf_header"]

MAX_HEADER_BYTES = 128 << 20
MAX_TENSORS = 100_000
MAX_KEYS = 10_000
MAX_ARRAY_ITEMS = 4_000_000
_MAX_NAME_BYTES = 1024
_MAX_DIMS = 4
_KEPT_ITEMS = 1024
"""Arrays up to this length are kept; longer ones hold vocabularies, which the text layer reads for itself."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

# ggml type id: (name, elements in a block, bytes of a block).
_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufArray:
    """A metadata array: its length, and its items (``None`` when it is too long to keep)."""

    count: int
    items: tuple[Any, ...] | None


GgufValue = int | float | bool | str | GgufArray


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensorInfo:
    """One tensor's claim.

    Attributes:
        shape: in torch's order (rows first); the file stores it reversed.
        type_id: ggml's number of the encoding; ``type_name`` is its name.
        offset: byte position in the file.
        nbytes: size as stored.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Metadata and tensor infos of one file."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensorInfo]


class _Cursor:
    """A position in the mapped file that refuses to pass its end, or the bound on headers."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason} (header byte {self.at}); download it again")

    def skip(self, count: int) -> int:
        """Move on by ``count`` bytes; returns where they start."""
        start = self.at
        if count > self.end - start:
            raise self.fail(f"the header claims {count} more bytes but {self.end - start} are left")
        self.at = start + count
        return start

    def scalar(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.data, self.skip(struct.calcsize(layout)))[0]

    def text(self, limit: int) -> str:
        length = self.scalar("<Q")
        if length > limit:
            raise self.fail(f"a string claims {length} bytes; the limit here is {limit}")
        start = self.skip(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def value(self) -> GgufValue:
        kind = self.scalar("<I")
        if kind == _ARRAY:
            return self._array()
        if kind == _STRING:
            return self.text(MAX_HEADER_BYTES)
        if kind not in _SCALARS:
            raise self.fail(f"a metadata value has the unknown type {kind}")
        value: GgufValue = self.scalar(_SCALARS[kind])
        return value

    def _array(self) -> GgufArray:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _ARRAY:
            raise self.fail("a metadata array holds arrays, which no supported model needs")
        if count > MAX_ARRAY_ITEMS:
            raise self.fail(f"a metadata array claims {count} items; the limit is {MAX_ARRAY_ITEMS}")
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            start = self.skip(count * struct.calcsize(layout))
            if count > _KEPT_ITEMS:
                return GgufArray(count=count, items=None)
            return GgufArray(count=count, items=struct.unpack_from(f"<{count}{layout[1]}", self.data, start))
        if kind != _STRING:
            raise self.fail(f"a metadata array has the unknown type {kind}")
        if count * 8 > self.end - self.at:
            raise self.fail(f"a metadata array claims {count} strings, more than the file can hold")
        if count <= _KEPT_ITEMS:
            return GgufArray(count=count, items=tuple(self.text(MAX_HEADER_BYTES) for _ in range(count)))
        for _ in range(count):
            self.skip(self.scalar("<Q"))
        return GgufArray(count=count, items=None)


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of one file; no tensor data is read.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is malformed or absurd.
        UnsupportedModelError: another GGUF version or byte order, or an unknown tensor encoding.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist or is not a file; complete the download")
    try:
        with path.open("rb") as file:
            if (size := path.stat().st_size) < 24:
                raise CheckpointError(f"{path} is {size} bytes, too short for a GGUF file; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse(cursor: _Cursor) -> GgufHeader:
    path = cursor.path
    if cursor.data[cursor.skip(4) : 4] != b"GGUF":
        raise CheckpointError(f"{path} does not start with GGUF; it is another kind of file or damaged")
    version = cursor.scalar("<I")
    if version not in (2, 3):
        kind = "big-endian files" if version & 0xFFFF == 0 and version else f"GGUF version {version}"
        raise UnsupportedModelError(f"{path}: {kind} cannot be read; convert it to little-endian GGUF version 3")
    tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    if tensor_count > MAX_TENSORS:
        raise cursor.fail(f"it claims {tensor_count} tensors; the limit is {MAX_TENSORS}")
    if key_count > MAX_KEYS:
        raise cursor.fail(f"it claims {key_count} metadata keys; the limit is {MAX_KEYS}")

    metadata: dict[str, GgufValue] = {}
    for _ in range(key_count):
        key = cursor.text(_MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.fail(f"the metadata key {key!r} occurs twice")
        metadata[key] = cursor.value()
    infos: dict[str, GgufTensorInfo] = {}
    for _ in range(tensor_count):
        info = _tensor_info(cursor)
        if info.name in infos:
            raise cursor.fail(f"the tensor {info.name!r} occurs twice")
        infos[info.name] = info
    return GgufHeader(path=path, metadata=metadata, tensors=_place(infos, metadata, cursor))


def _tensor_info(cursor: _Cursor) -> GgufTensorInfo:
    """Read one info; its offset still counts from the start of the data."""
    name = cursor.text(_MAX_NAME_BYTES)
    dims = cursor.scalar("<I")
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} claims {dims} dimensions; 1 to {_MAX_DIMS} are possible")
    shape = tuple(cursor.scalar("<Q") for _ in range(dims))[::-1]
    if min(shape) == 0 or max(shape) > 1 << 48:
        raise cursor.fail(f"tensor {name!r} has the impossible shape {shape}")
    type_id, offset = cursor.scalar("<I"), cursor.scalar("<Q")
    if type_id not in _TYPES:
        raise UnsupportedModelError(f"{cursor.path}: tensor {name!r} has the unsupported ggml type {type_id}")
    type_name, block, block_bytes = _TYPES[type_id]
    if shape[-1] % block:
        raise cursor.fail(f"tensor {name!r} has rows of {shape[-1]}, which is no multiple of {type_name}'s {block}")
    nbytes = prod(shape) // block * block_bytes
    return GgufTensorInfo(name=name, shape=shape, type_id=type_id, type_name=type_name, offset=offset, nbytes=nbytes)


def _place(
    infos: dict[str, GgufTensorInfo], metadata: dict[str, GgufValue], cursor: _Cursor
) -> dict[str, GgufTensorInfo]:
    """Turn offsets into file positions and check that all data lies in the file, aligned and apart."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}; it must be a power of two from 8 to 65536")
    start = -(-cursor.at // alignment) * alignment
    size = len(cursor.data)
    placed: dict[str, GgufTensorInfo] = {}
    free_from = start
    for info in sorted(infos.values(), key=lambda info: info.offset):
        offset = start + info.offset
        if info.offset % alignment:
            raise cursor.fail(f"tensor {info.name!r} lies at offset {info.offset}, not a multiple of {alignment}")
        if offset < free_from:
            raise cursor.fail(f"tensor {info.name!r} overlaps the tensor before it")
        free_from = offset + info.nbytes
        if free_from > size:
            raise CheckpointError(
                f"{cursor.path} is cut short: tensor {info.name!r} ends at byte {free_from} but the file has {size}; "
                "download it again"
            )
        placed[info.name] = GgufTensorInfo(
            name=info.name,
            shape=info.shape,
            type_id=info.type_id,
            type_name=info.type_name,
            offset=offset,
            nbytes=info.nbytes,
        )
    return placed
