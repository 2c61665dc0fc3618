"""The attention backend for CUDA: prefill, chunked prefill, decode and mixed steps straight from the block tables.

The idea: a step's entries fall into two classes by their number of new tokens. *Decode* entries have one, which makes
one small tile; *prefill* entries have more and are cut into large tiles. A mixed step launches the same kernel once for
each class. A launch has a fixed number of item slots for each KV head, chosen from counts that the host knows, and the
work list made on the device spreads the keys over them (see ``work_list``). So nothing waits for the device, and a
captured step is right whatever lengths it is replayed with: its launches depend on the number of entries, or on bounds
for it, only. Prefills with tiles enough for the whole device have a kernel of their own on Hopper
(``prefill_attention``); a step with bounds, whose tiles nobody counts, leaves it alone.

A plan owns the device memory of one step and is used on the compute stream only. The backend itself is immutable.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from gapless.kernels.attend_tiles import attend_kernel
from gapless.kernels.attention_tiles import (
    WHOLE_TILE,
    TileShape,
    default_decode_tile,
    default_prefill_tile,
    padded_dim,
    tile_rows,
)
from gapless.kernels.dependent_launch import dependent_launch_options, has_dependent_launch
from gapless.kernels.gluon_support import can_run_gluon
from gapless.kernels.launch import launch_kernel
from gapless.kernels.work_list import ITEM_FIELDS, TileClass, WorkList, build_work_list
from gapless.layers.forward_inputs import ForwardInputs

__all__ = ["AttentionPlan", "TritonAttention", "paged_attention_reference"]

_LOG2_E = 1.4426950408889634
# Elements of one step of the combine: 64 registers a thread at 4 warps.
_COMBINE_ELEMENTS = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class _Geometry:
    """What the layers that share a work list have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """One launch of the kernel: its items, and the partial results of tiles whose keys are split."""

    tile: TileShape
    constants: dict[str, Any]  # the kernel's, and its launch options; what is left is whether it is launched early
    work: WorkList
    partial_out: Tensor  # [split slots, num_kv_heads, tile_tokens * group, head_dim], fp32
    partial_lse: Tensor  # the same without head_dim, base 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """One step's inputs, and what each kind of layer has, made when the first such layer attends.

    Attributes:
        inputs: the step's.
        block_size: tokens in a block.
        launches: of each kind of layer.
        results: of a step with bounds, where its layers' results go.
    """

    inputs: ForwardInputs
    block_size: int
    launches: dict[_Geometry, list[_Launch]] = field(default_factory=dict)
    results: dict[_Geometry, Tensor] = field(default_factory=dict)


class TritonAttention:
    """``AttentionBackend`` for CUDA devices.

    Args:
        num_multiprocessors: how many programs groups of the device run side by side; sizes the split of contexts.
        decode_tile: settings for entries of one new token; default by head size and dtype.
        prefill_tile: settings for the others.
        programs_per_multiprocessor: how finely contexts are split: programs wanted on each multiprocessor.
        shared_memory_bytes: what one program may use; sizes the default decode tile.
        dependent_launch: use programmatic dependent launch (compute capability 9.0 and later). The kernel before may
            then write ``q``, ``keys`` and ``values``, but none of the step's inputs.
        gluon: long prefills by ``prefill_attention``, see :func:`~gapless.kernels.gluon_support.can_run_gluon`.
    """

    def __init__(
        self,
        *,
        num_multiprocessors: int,
        decode_tile: TileShape | None = None,
        prefill_tile: TileShape | None = None,
        programs_per_multiprocessor: int = 1,
        shared_memory_bytes: int = 0,
        dependent_launch: bool = False,
        gluon: bool = False,
    ) -> None:
        self._gluon = gluon
        self._programs = num_multiprocessors * programs_per_multiprocessor
        self._decode_tile = decode_tile
        self._prefill_tile = prefill_tile
        self._shared_memory_bytes = shared_memory_bytes
        self._dependent_launch = dependent_launch

    @classmethod
    def for_device(cls, device: torch.device) -> "TritonAttention":
        """The backend with default settings for a CUDA device."""
        properties = torch.cuda.get_device_properties(device)
        return cls(
            num_multiprocessors=properties.multi_processor_count,
            shared_memory_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            dependent_launch=has_dependent_launch(device),
            gluon=can_run_gluon(device),
        )

    def plan(self, inputs: ForwardInputs, block_size: int) -> AttentionPlan:
        """Start a step. Launches nothing: the work lists are made when the first layer of each kind attends."""
        return AttentionPlan(inputs=inputs, block_size=block_size)

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attend from each of the step's tokens to its own context, up to and including itself.

        Args:
            q: ``[num_tokens, num_heads, head_dim]``, bf16, fp16 or fp32; any strides with unit stride in ``head_dim``.
            keys: ``[num_slots, num_kv_heads, head_dim]`` of the same dtype, addressed by block and offset; this step's
                keys have been written.
            values: the same for values.
            plan: what :meth:`plan` returned for this step.
            scale: factor on the scores before softmax.
            window: each token sees at most this many keys, itself included; ``None`` is the whole context.
            out: where the result goes, ``[num_tokens, num_heads * head_dim]``, contiguous; default a new tensor.

        Returns:
            ``[num_tokens, num_heads * head_dim]`` in the dtype of ``q``. In a step with bounds the next layer's call
            overwrites it, and tokens of no entry have zeros.
        """
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[1]
        assert num_heads % num_kv_heads == 0
        assert keys.shape[2] == head_dim
        assert keys.shape == values.shape
        assert keys.stride() == values.stride()
        assert q.dtype == keys.dtype == values.dtype
        assert q.stride(2) == keys.stride(2) == 1
        geometry = _Geometry(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=q.dtype, window=window
        )
        if out is None:
            out = _new_result(plan, geometry, num_tokens, q.device)
        assert out.is_contiguous()
        assert out.shape == (num_tokens, num_heads * head_dim)
        launches = plan.launches.get(geometry)
        # A fresh work list is written by the kernel just before, which a dependent launch would not wait for.
        dependent = self._dependent_launch and launches is not None
        if launches is None:
            whole = self._can_attend_whole(q, keys, values, plan.block_size, window)
            launches = self._make_launches(plan, geometry, whole=whole)
            plan.launches[geometry] = launches
        for launch in launches:
            _enqueue(launch, q, keys, values, out, plan, geometry, scale=scale, dependent=dependent)
        return out

    def _can_attend_whole(self, q: Tensor, keys: Tensor, values: Tensor, block_size: int, window: int | None) -> bool:
        """Whether prefills with tiles enough may be done by ``prefill_attention``."""
        if not self._gluon or self._prefill_tile is not None or window is not None:
            return False
        from gapless.kernels.prefill_attention import can_attend_whole

        return can_attend_whole(q, keys, values, block_size)

    def _make_launches(self, plan: AttentionPlan, geometry: _Geometry, *, whole: bool) -> list[_Launch]:
        """Decide the launches of one kind of layer and enqueue the making of their work lists.

        ``whole``: long prefills may be done by ``prefill_attention``.
        """
        inputs = plan.inputs
        decode = self._decode_tile or default_decode_tile(
            geometry.head_dim, geometry.dtype, shared_memory_bytes=self._shared_memory_bytes
        )
        prefill = self._prefill_tile or default_prefill_tile(geometry.head_dim, geometry.dtype)
        group = geometry.num_heads // geometry.num_kv_heads
        # Programs wanted for each KV head.
        wanted = -(-self._programs // geometry.num_kv_heads)
        classes = [(decode, _decode_class(decode, wanted))]
        whole_class = _prefill_class(WHOLE_TILE, group, wanted)
        if whole and whole_class.count_tiles(inputs.host_query_lens) >= wanted:
            classes.append((WHOLE_TILE, whole_class))
        else:
            classes.append((prefill, _prefill_class(prefill, group, wanted)))
        launches: list[_Launch] = []
        for tile, tile_class in classes:
            most_tiles = _most_tiles(inputs, tile_class)
            if not most_tiles:
                continue
            work = build_work_list(
                inputs,
                tile_class,
                most_tiles=most_tiles,
                num_kv_heads=geometry.num_kv_heads,
                window=geometry.window,
            )
            size = (_split_slots(inputs, tile_class, most_tiles), geometry.num_kv_heads, tile_class.tile_tokens * group)
            device = inputs.seq_lens.device
            launches.append(
                _Launch(
                    tile=tile,
                    constants=_constants(tile, tile_class, geometry, plan.block_size),
                    work=work,
                    partial_out=torch.empty((*size, geometry.head_dim), dtype=torch.float32, device=device),
                    partial_lse=torch.empty(size, dtype=torch.float32, device=device),
                )
            )
        return launches


def _decode_class(tile: TileShape, wanted: int) -> TileClass:
    """Decode has room to split its long contexts whatever the number of entries; its partial results are small."""
    return TileClass(min_query=1, max_query=1, tile_tokens=1, tile_keys=tile.keys, spare_items=wanted, least_items=0)


def _prefill_class(tile: TileShape, group: int, wanted: int) -> TileClass:
    """Prefill splits only while its tiles alone leave multiprocessors without work."""
    return TileClass(
        min_query=2,
        max_query=2**31 - 1,
        tile_tokens=tile_rows(tile, group) // group,
        tile_keys=tile.keys,
        spare_items=0,
        least_items=wanted,
    )


def _most_tiles(inputs: ForwardInputs, tile_class: TileClass) -> int:
    """How many tiles there are, or may be in a step with bounds; nothing is launched for none."""
    if inputs.bounds is None:
        return tile_class.count_tiles(inputs.host_query_lens)
    if tile_class.max_query == 1:
        return inputs.bounds.decodes
    # Whole tiles, and a part of one for each entry.
    return len(inputs.input_ids) // tile_class.tile_tokens + inputs.bounds.prefills


def _split_slots(inputs: ForwardInputs, tile_class: TileClass, most_tiles: int) -> int:
    """How many slots, from the first, may hold an item of a split tile, whose result is stored in between."""
    if tile_class.spare_items:
        return tile_class.most_items(most_tiles)
    if inputs.bounds is None and most_tiles >= tile_class.least_items:
        return 0
    return tile_class.least_items


def _new_result(plan: AttentionPlan, geometry: _Geometry, num_tokens: int, device: torch.device) -> Tensor:
    """Where a layer's result goes: a new tensor, or, where tokens of no entry get none, one that was cleared before."""
    shape, dtype = (num_tokens, geometry.num_heads * geometry.head_dim), geometry.dtype
    if plan.inputs.bounds is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if geometry not in plan.results:
        plan.results[geometry] = torch.zeros(shape, dtype=dtype, device=device)
    return plan.results[geometry]


def _constants(tile: TileShape, tile_class: TileClass, geometry: _Geometry, block_size: int) -> dict[str, Any]:
    group, tile_tokens = geometry.num_heads // geometry.num_kv_heads, tile_class.tile_tokens
    padded = padded_dim(geometry.head_dim)
    combine_rows = triton.next_power_of_2(tile_tokens * group)
    return {
        "NUM_KV_HEADS": geometry.num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": geometry.head_dim,
        "PADDED_DIM": padded,
        "BLOCK_SIZE": block_size,
        "ITEM_FIELDS": ITEM_FIELDS,
        "TILE_ROWS": tile_rows(tile, group),
        "TILE_TOKENS": tile_tokens,
        "TILE_KEYS": tile.keys,
        "COMBINE_ROWS": combine_rows,
        "COMBINE_ITEMS": min(64, max(1, _COMBINE_ELEMENTS // (combine_rows * padded))),
        "HAS_WINDOW": geometry.window is not None,
        # A second loop pays where masks cost tensor-core time, not where memory is the bound.
        "UNMASKED_PHASE": geometry.window is None and tile_tokens > 1,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _enqueue(
    launch: _Launch,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    plan: AttentionPlan,
    geometry: _Geometry,
    *,
    scale: float,
    dependent: bool,
) -> None:
    """Enqueue one launch of an attention kernel on the current stream."""
    tile, tables = launch.tile, plan.inputs.block_tables
    if tile is WHOLE_TILE:
        from gapless.kernels.prefill_attention import attend_tiles_whole

        attend_tiles_whole(
            q, keys, values, out, tables, launch.work, plan.block_size, qk_scale=scale * _LOG2_E, dependent=dependent
        )
        return
    launch_kernel(
        attend_kernel,
        (geometry.num_kv_heads, launch.work.num_slots),
        *(q, keys, values, out, launch.work.items, tables),
        *(launch.partial_out, launch.partial_lse, launch.work.arrivals),
        *(scale * _LOG2_E, geometry.window or 0, q.stride(0), q.stride(1)),
        *(keys.stride(0), keys.stride(1), tables.stride(0)),
        **launch.constants,
        DEPENDENT_LAUNCH=dependent,
        **dependent_launch_options(on=dependent),
    )


def paged_attention_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    inputs: ForwardInputs,
    block_size: int,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """What :meth:`TritonAttention.attend` computes, in plain torch and fp32, one entry after another.

    Takes the same arguments (``inputs`` and ``block_size`` in place of the plan), on any device, and returns
    ``[num_tokens, num_heads * head_dim]`` in fp32. It waits for the device.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // keys.shape[1]
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
    starts, seq_lens = inputs.query_starts.tolist(), inputs.seq_lens.tolist()
    for entry, seq_len in enumerate(seq_lens):
        begin, end = starts[entry], starts[entry + 1]
        at = torch.arange(seq_len, device=q.device)
        table = inputs.block_tables[inputs.rows[entry]].long()
        slots = table[at // block_size] * block_size + at % block_size
        k = keys[slots].float().repeat_interleave(group, 1)
        v = values[slots].float().repeat_interleave(group, 1)
        position = at[seq_len - (end - begin) :, None]
        visible = at <= position
        if window is not None:
            visible &= at > position - window
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), k) * scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out.flatten(1)
