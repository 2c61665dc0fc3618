"""Filling a model's memory from named tensors: every place is filled or the load fails, and nothing is guessed.

A model offers :class:`WeightSlot` by parameter name; a slot may be a part of a stacked matrix, so that a missing
``q_proj`` is noticed although the memory it belongs to was partly written. Used by the thread that loads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.errors import CheckpointError

__all__ = ["LoadReport", "WeightSlot", "fill_slots"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Buffers that older versions of transformers saved; they follow from the config.
_KNOWN_BUFFERS = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")

_SHOWN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSlot:
    """Where one tensor of a checkpoint goes.

    Attributes:
        target: device memory, possibly a view of a stacked tensor. It may have leading axes more than ``shape``, over
            which the tensor is repeated.
        shape: the shape the checkpoint's tensor must have.
    """

    target: Tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What came of a load.

    Attributes:
        num_loaded: tensors copied into the model.
        unknown: names of tensors that the model has no place for, in the order of the checkpoint.
        tied: whether the output head is the embedding.
    """

    num_loaded: int
    unknown: tuple[str, ...]
    tied: bool = False


def fill_slots(slots: Mapping[str, WeightSlot], tensors: Iterable[tuple[str, Tensor]]) -> tuple[set[str], list[str]]:
    """Copy each tensor into its slot, converting dtype and device.

    Args:
        slots: the model's places by parameter name.
        tensors: names and tensors of the checkpoint, in any order, each name once.

    Returns:
        The names filled, and the names that have no slot.

    Raises:
        CheckpointError: for a wrong shape or dtype, a name given twice, or a slot left empty.
    """
    filled: set[str] = set()
    unknown: list[str] = []
    for name, tensor in tensors:
        slot = slots.get(name)
        if slot is None:
            if not name.endswith(_KNOWN_BUFFERS):
                unknown.append(name)
            continue
        if name in filled:
            raise CheckpointError(f"tensor {name!r} is in the checkpoint twice; keep one")
        _check(name, tensor, slot)
        slot.target.copy_(tensor)
        filled.add(name)
    missing = [name for name in slots if name not in filled]
    if missing:
        rest = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"the checkpoint has no tensor for {', '.join(missing[:_SHOWN])}{rest}; "
            "it is incomplete or does not belong to this config"
        )
    return filled, unknown


def _check(name: str, tensor: Tensor, slot: WeightSlot) -> None:
    if tuple(tensor.shape) != slot.shape:
        raise CheckpointError(
            f"tensor {name!r} has shape {list(tensor.shape)}, expected {list(slot.shape)}; "
            "the weights do not belong to this config"
        )
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"tensor {name!r} has dtype {tensor.dtype}; only unquantised floating weights are supported"
        )
