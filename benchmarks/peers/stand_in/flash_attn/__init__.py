"""A stand-in for the flash-attn package, for one benchmark: what transformers' continuous batching calls, and no more.

flash-attn has to be compiled for hours, or is missing from an image, and without it transformers has no fast decode
path, which would make a comparison cheap. So decode steps run gapless's own kernel (:class:`TritonAttention`): both
engines read their caches in the same way and differ in everything else. Prefills run the FlashAttention-2 that torch
brings along (``aten::_flash_attention_forward``).

transformers finds this package through the ``dist-info`` folder beside it, by the usual look-ups; nothing is patched.
CUDA graphs capture what is launched here: no launch depends on a length, and lengths are read on the device.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_attn.bert_padding import pad_input
from gapless.kernels.paged_attention import AttentionPlan, TritonAttention
from gapless.layers.forward_inputs import ForwardInputs

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
__version__ = "2.8.3"

# For dense batches, which continuous batching has none of; transformers imports the name.
flash_attn_func = pad_input


@triton.jit
def _append_kernel(
    keys,
    values,
    new_keys,
    new_values,
    lengths,
    tables,
    table_stride,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
):
    # One program an entry. Entries that pad a captured step have the length -1 and no pages.
    entry = tl.program_id(0)
    length = tl.load(lengths + entry).to(tl.int32)
    if length >= 0:
        page = tl.load(tables + entry * table_stride + length // PAGE).to(tl.int64)
        if page >= 0:
            slot = (page * PAGE + length % PAGE) * SIZE
            source = entry.to(tl.int64) * SIZE
            c = tl.arange(0, PADDED)
            inside = c < SIZE
            tl.store(keys + slot + c, tl.load(new_keys + source + c, mask=inside), mask=inside)
            tl.store(values + slot + c, tl.load(new_values + source + c, mask=inside), mask=inside)


@dataclass(kw_only=True, slots=True)
class _Step:
    """The decode step at hand. Its layers share a plan, as they do in gapless, where the plan is made once a step.

    A layer is known by the address of its cache; one that comes again begins the next step. So a process may have one
    set of caches only, which is what a benchmark of one engine has.
    """

    plan: AttentionPlan
    num_entries: int
    layers: set[int] = field(default_factory=set)


_backends: dict[torch.device, TritonAttention] = {}
_steps: dict[torch.device, _Step] = {}


def _backend(device: torch.device) -> TritonAttention:
    if device not in _backends:
        on_gpu = device.type == "cuda"
        # Elsewhere it is Triton's interpreter, for tests.
        _backends[device] = TritonAttention.for_device(device) if on_gpu else TritonAttention(num_multiprocessors=4)
    return _backends[device]


def _plan(layer: int, lengths: Tensor, block_table: Tensor, page: int) -> AttentionPlan:
    """The plan of the step that this call belongs to."""
    device, num_entries = lengths.device, lengths.shape[0]
    step = _steps.get(device)
    if step is None or layer in step.layers or step.num_entries != num_entries:
        ones = (1,) * num_entries
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        inputs = ForwardInputs(
            input_ids=nothing,
            positions=nothing,
            slot_mapping=nothing,
            query_starts=torch.arange(num_entries + 1, dtype=torch.int32, device=device),
            # Padding reads one token of page 0 and its result is dropped.
            seq_lens=(lengths.to(torch.int32) + 1).clamp(min=1),
            rows=torch.arange(num_entries, dtype=torch.int32, device=device),
            block_tables=block_table.clamp(min=0).contiguous(),
            logits_indices=nothing,
            host_query_lens=ones,
            host_seq_lens=(),
        )
        step = _Step(plan=_backend(device).plan(inputs, page), num_entries=num_entries)
        _steps[device] = step
    step.layers.add(layer)
    return step.plan


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """One decode step of one layer: write each entry's new key and value, then attend to its whole context.

    Args:
        q: ``[entries, 1, heads, head_dim]``.
        k_cache: ``[pages, page, kv_heads, head_dim]``, contiguous; written in place.
        v_cache: the same for values.
        k: ``[entries, 1, kv_heads, head_dim]``, the new keys.
        v: the same for values.
        cache_seqlens: ``[entries]``, int: tokens already in the cache; -1 for padding.
        block_table: ``[entries, most pages]``, int32; -1 where there is no page.
        softmax_scale: factor on the scores; default the root of ``1 / head_dim``.
        causal: means nothing with one query token.
        window_size: keys seen to the left of the token, and to its right; -1 is all.

    Returns:
        ``[entries, 1, heads, head_dim]``.
    """
    entries, one, heads, head_dim = q.shape
    page, kv_heads = k_cache.shape[1:3]
    assert one == 1, "only decode steps come with a block table"
    size = kv_heads * head_dim
    keys, values = k_cache.view(-1, kv_heads, head_dim), v_cache.view(-1, kv_heads, head_dim)
    _append_kernel[(entries,)](
        keys,
        values,
        k.reshape(entries, size).contiguous(),
        v.reshape(entries, size).contiguous(),
        cache_seqlens,
        block_table,
        block_table.stride(0),
        PAGE=page,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
    )
    out = _backend(q.device).attend(
        q.reshape(entries, heads, head_dim),
        keys,
        values,
        _plan(k_cache.data_ptr(), cache_seqlens, block_table, page),
        scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
        window=None if window_size[0] < 0 else window_size[0] + 1,
    )
    return out.view(entries, 1, heads, head_dim)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Prefill of ragged entries, ``q``: ``[tokens, heads, head_dim]``, by torch's own FlashAttention-2."""
    left, right = (None if reach < 0 else reach for reach in window_size)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        0.0,
        causal,
        False,
        scale=softmax_scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
