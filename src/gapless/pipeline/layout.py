"""Where each field of a step lies in its packed buffer: :class:`StepLayout`, a pure function of the step's sizes.

The fields of fixed length come first, so that within a bucket their addresses never change; the variable ones (table
changes, row initialisation, masked tokens, work on wide rows, log-probs) form the tail. Every field has its own dtype
and starts at a multiple of 8 bytes.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.wide_rows import WIDE_FIELDS, WideLimits, wide_capacity, wide_sizes

__all__ = ["StepLayout", "StepSizes", "capacity_bytes", "layout_of", "sizes_of"]


class StepSizes(NamedTuple):
    """Lengths that decide a layout."""

    tokens: int
    entries: int
    samples: int
    random: int
    changes: int
    inits: int
    masked: int
    penalised: int = 0
    biased: int = 0
    worded: int = 0
    penalty_inits: int = 0
    penalty_values: int = 0
    prompt_history: int = 0
    output_history: int = 0
    bias_inits: int = 0
    bias_entries: int = 0
    word_inits: int = 0
    word_tokens: int = 0
    word_recent: int = 0
    rated: int = 0
    full: int = 0
    prompt_rated: int = 0


class Field(NamedTuple):
    """A field's place, in bytes, and its dtypes on both sides."""

    offset: int
    length: int
    host: type[np.generic]
    device: torch.dtype


# (name, which size, numpy dtype, torch dtype)
_FIELDS: tuple[tuple[str, str, type[np.generic], torch.dtype], ...] = (
    ("input_ids", "tokens", np.int32, torch.int32),
    ("positions", "tokens", np.int32, torch.int32),
    ("carry", "tokens", np.int32, torch.int32),
    ("token_rows", "tokens", np.int32, torch.int32),
    ("query_starts", "entries", np.int32, torch.int32),
    ("seq_lens", "entries", np.int32, torch.int32),
    ("rows", "entries", np.int32, torch.int32),
    ("sample_tokens", "samples", np.int32, torch.int32),
    ("sample_rows", "samples", np.int32, torch.int32),
    ("output_positions", "samples", np.int32, torch.int32),
    ("random_samples", "random", np.int32, torch.int32),
    ("change_rows", "changes", np.int32, torch.int32),
    ("change_columns", "changes", np.int32, torch.int32),
    ("change_blocks", "changes", np.int32, torch.int32),
    ("init_rows", "inits", np.int32, torch.int32),
    ("init_top_k", "inits", np.int32, torch.int32),
    ("init_temperature", "inits", np.float32, torch.float32),
    ("init_top_p", "inits", np.float32, torch.float32),
    ("init_min_p", "inits", np.float32, torch.float32),
    ("init_seed", "inits", np.int64, torch.int64),
    ("masked_samples", "masked", np.int32, torch.int32),
    ("masked_tokens", "masked", np.int32, torch.int32),
    *WIDE_FIELDS,
    ("rated_samples", "rated", np.int32, torch.int32),
    ("full_samples", "full", np.int32, torch.int32),
    ("prompt_rated_indices", "prompt_rated", np.int32, torch.int32),
    ("prompt_rated_tokens", "prompt_rated", np.int32, torch.int32),
)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Fields by name, and how many bytes of the buffer a step uses (only those are copied)."""

    fields: dict[str, Field]
    num_bytes: int

    def host(self, buffer: NDArray[np.uint8], name: str) -> NDArray[Any]:
        """The field as an array over ``buffer``."""
        field = self.fields[name]
        size = field.length * np.dtype(field.host).itemsize
        return buffer[field.offset : field.offset + size].view(field.host)

    def device(self, buffer: Tensor, name: str) -> Tensor:
        """The field as a tensor over ``buffer``."""
        field = self.fields[name]
        return buffer[field.offset : field.offset + field.length * field.device.itemsize].view(field.device)


def sizes_of(batch: ScheduledBatch) -> StepSizes:
    """The sizes of a batch."""
    return StepSizes(
        tokens=len(batch.input_ids),
        entries=len(batch.rows),
        samples=len(batch.sample_rows),
        random=len(batch.random_samples),
        changes=len(batch.table_changes),
        inits=len(batch.row_inits),
        masked=len(batch.masked_tokens),
        **wide_sizes(batch.wide),
        rated=0 if batch.logprobs is None else len(batch.logprobs.samples),
        full=0 if batch.logprobs is None else len(batch.logprobs.full_samples),
        prompt_rated=0 if batch.logprobs is None else len(batch.logprobs.prompt_tokens),
    )


@lru_cache(maxsize=1024)
def layout_of(sizes: StepSizes) -> StepLayout:
    """Lay the fields out for ``sizes``."""
    fields: dict[str, Field] = {}
    offset = 0
    for name, size, host, device in _FIELDS:
        length = getattr(sizes, size) + (name == "query_starts")
        fields[name] = Field(offset, length, host, device)
        offset += -(-length * device.itemsize // 8) * 8
    return StepLayout(fields, offset)


def capacity_bytes(
    *, max_tokens: int, max_rows: int, max_changes: int, max_masked: int, max_prompt_rated: int, wide: WideLimits
) -> int:
    """Bytes that the largest possible step needs."""
    sizes = StepSizes(
        max_tokens,
        max_rows,
        max_rows,
        max_rows,
        max_changes,
        max_rows,
        max_masked,
        **wide_capacity(wide, max_rows),
        rated=max_rows,
        full=max_rows,
        prompt_rated=max_prompt_rated,
    )
    return layout_of(sizes).num_bytes
