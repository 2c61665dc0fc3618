"""A GGUF checkpoint: one file or its split parts, walked as tensors under Hugging Face names.

Opening checks headers and metadata only. The ``gguf`` package is imported here alone, and only for its dequantisers,
so files of plain floats are read without it. What the format stores in another way than ``transformers`` is undone on
the way: names, the row order of Q and K (llama and mistral), and the RoPE divisors, which become configuration.

Reading adds no error of its own: an F32 file gives bit for bit the tensors it was made from, any other what its
encoding keeps of them (``test_c52_rounded_encodings_stay_within_their_bound`` has the bounds for logits).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.checkpoint.base import Checkpoint, ProgressCallback, TokenizerSource
from gapless.model.checkpoint.gguf_config import (
    PERMUTED_ARCHITECTURES,
    architecture_of,
    config_from_gguf,
    stop_ids_of,
)
from gapless.model.checkpoint.gguf_header import GgufHeader, GgufTensorInfo, read_gguf_header

__all__ = ["GgufWeights", "open_gguf"]

_Dequantize = Callable[[npt.NDArray[np.uint8], str], npt.NDArray[np.float32]]

_ROPE_FREQS = "rope_freqs.weight"
_REFUSED = ("rope_factors_long.weight", "rope_factors_short.weight")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d{1,5})\.(?P<part>\w+)\.(?P<kind>weight|bias)")
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One file and its tensors in file order."""

    path: Path
    infos: tuple[GgufTensorInfo, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufWeights:
    """The tensors of one GGUF checkpoint.

    Attributes:
        parts: the files.
        interleaved_heads: how many heads the rows of ``attn_q`` and ``attn_k`` form, where their order must be undone;
            empty for architectures that are stored as ``transformers`` has them.
    """

    parts: tuple[_Part, ...]
    interleaved_heads: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Size of all tensors as stored, before dequantising."""
        return sum(info.nbytes for part in self.parts for info in part.infos)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by parameter name, file by file; a tensor without a counterpart keeps its GGUF name."""
        return {_hf_name(info.name): info.shape for part in self.parts for info in part.infos}

    def tensors(self, on_progress: ProgressCallback | None) -> Iterator[tuple[str, Tensor]]:
        """Yield F32, F16 and BF16 tensors in their own dtype and dequantised ones in fp32."""
        done, total = 0, self.total_bytes
        dequantize = _dequantizer({info.type_name for part in self.parts for info in part.infos}, self.parts[0].path)
        for part in self.parts:
            data = _map_file(part.path)
            for info in part.infos:
                yield _hf_name(info.name), self._reorder(_decode(data, info, dequantize), info, part.path)
                done += info.nbytes
                if on_progress is not None:
                    on_progress(done, total)

    def _reorder(self, tensor: Tensor, info: GgufTensorInfo, path: Path) -> Tensor:
        match = _BLOCK_NAME.fullmatch(info.name)
        heads = self.interleaved_heads.get(match["part"]) if match else None
        if heads is None:
            return tensor
        if tensor.shape[0] % (2 * heads):
            raise CheckpointError(f"{path}: {info.name} has {tensor.shape[0]} rows, which do not form {heads} heads")
        return _undo_interleaving(tensor, heads)


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one given any of them.

    Raises:
        CheckpointError: a file is missing, damaged or absurd, or quantised while the ``gguf`` package is missing.
        UnsupportedModelError: an architecture, feature or encoding that is not supported, by name.
    """
    headers = _read_parts(path)
    first = headers[0]
    architecture = architecture_of(first)
    infos: dict[str, GgufTensorInfo] = {}
    for header in headers:
        if twice := infos.keys() & header.tensors.keys():
            raise CheckpointError(f"{header.path}: tensor {min(twice)!r} is in an earlier part too; download it again")
        infos |= header.tensors
    if refused := [name for name in _REFUSED if name in infos]:
        raise UnsupportedModelError(f"{first.path}: the tensor {refused[0]!r} (longrope scaling) is not supported")
    # All encodings are tried on an empty block now, so that none fails half-way through loading.
    _dequantizer({info.type_name for info in infos.values()}, first.path)

    config = config_from_gguf(first, infos, _rope_divisors(headers))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = GgufWeights(
        parts=tuple(
            _Part(path=h.path, infos=tuple(info for info in h.tensors.values() if info.name != _ROPE_FREQS))
            for h in headers
        ),
        interleaved_heads=heads if architecture in PERMUTED_ARCHITECTURES else {},
    )
    stop_ids = stop_ids_of(first, config.vocab_size)
    return Checkpoint.from_config(
        config,
        generation_config={},
        eos_token_ids=frozenset(stop_ids),
        tokenizer_source=TokenizerSource(kind="gguf", path=first.path, eos_token_id=config.eos_token_id),
        weights=weights,
    )


def _read_parts(path: Path) -> list[GgufHeader]:
    """Read the headers of all parts, in order."""
    header = read_gguf_header(path)
    count = header.metadata.get("split.count", 1)
    if type(count) is not int:
        raise CheckpointError(f"{path}: split.count is {count!r}; it must be a whole number")
    if count <= 1:
        return [header]
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of {count} parts; keep the names that end in -00001-of-{count:05d}.gguf, side by side"
        )
    paths = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise CheckpointError(f"{path.parent} lacks {missing[0]} ({len(missing)} of {count} parts are missing)")
    headers = [read_gguf_header(part) for part in paths]
    for number, part in enumerate(headers):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
            raise CheckpointError(f"{part.path} does not say that it is part {number + 1} of {count}; get it anew")
    held = sum(len(part.tensors) for part in headers)
    if (promised := headers[0].metadata.get("split.tensors.count", held)) != held:
        raise CheckpointError(f"{paths[0]} promises {promised} tensors but its {count} parts hold {held}")
    return headers


def _rope_divisors(headers: list[GgufHeader]) -> npt.NDArray[np.float32] | None:
    for header in headers:
        if (info := header.tensors.get(_ROPE_FREQS)) is not None:
            if info.type_name != "F32" or len(info.shape) != 1:
                raise CheckpointError(f"{header.path}: {_ROPE_FREQS} is {info.type_name} {list(info.shape)}, not F32")
            divisors: npt.NDArray[np.float32] = _bytes_of(_map_file(header.path), info).view(np.float32).copy()
            return divisors
    return None


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match["part"] not in _BLOCK_PARTS:
        return name
    return f"model.layers.{int(match['layer'])}.{_BLOCK_PARTS[match['part']]}.{match['kind']}"


def _map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Map a file; copy-on-write, because torch warns about arrays it may not write to."""
    try:
        return np.memmap(path, mode="c", dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}") from error


def _bytes_of(data: npt.NDArray[np.uint8], info: GgufTensorInfo) -> npt.NDArray[np.uint8]:
    return np.asarray(data[info.offset : info.offset + info.nbytes])


def _decode(data: npt.NDArray[np.uint8], info: GgufTensorInfo, dequantize: _Dequantize) -> Tensor:
    """One tensor, ``info.shape``: a view of the mapped file for float types, else dequantised to fp32."""
    stored = _bytes_of(data, info)
    if info.type_name in _FLOATS:
        return torch.from_numpy(stored).view(_FLOATS[info.type_name]).view(info.shape)
    rows = stored.reshape(*info.shape[:-1], -1)
    return torch.from_numpy(dequantize(rows, info.type_name)).view(info.shape)


def _undo_interleaving(tensor: Tensor, heads: int) -> Tensor:
    """Put each head's rows from pairs ``(0, h), (1, h + 1), ...`` back into halves, ``h`` being half the head size.

    Args:
        tensor: ``[heads * head_dim, ...]``.
    """
    half = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, half, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _dequantizer(type_names: set[str], path: Path) -> _Dequantize:
    """Return a function that decodes these encodings, each tried on one empty block first.

    Raises:
        CheckpointError: the ``gguf`` package is needed and missing.
        UnsupportedModelError: the installed ``gguf`` has no dequantiser for an encoding.
    """
    quantised = sorted(type_names - _FLOATS.keys())
    if not quantised:
        return _no_dequantizer
    try:
        import gguf
        from gguf import quants
    except ImportError:
        raise CheckpointError(
            f"{path} is quantised ({', '.join(quantised)}), which needs the gguf package: pip install 'gguf>=0.17'"
        ) from None

    def dequantize(rows: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
        # Damaged scales may overflow here; they surface as non-finite logits, not as numpy warnings.
        with np.errstate(all="ignore"):
            result: npt.NDArray[Any] = quants.dequantize(rows, gguf.GGMLQuantizationType[type_name])
        return np.ascontiguousarray(result, dtype=np.float32)

    for name in quantised:
        try:
            block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
            dequantize(np.zeros((1, block_bytes), dtype=np.uint8), name)
        except (KeyError, NotImplementedError):
            raise UnsupportedModelError(f"{path}: the encoding {name} has no dequantiser in gguf") from None
    return dequantize


def _no_dequantizer(rows: npt.NDArray[np.uint8], type_name: str) -> npt.NDArray[np.float32]:
    raise AssertionError(f"{type_name} was not announced")
