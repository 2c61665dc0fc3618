# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""A layer's new keys and values into the paged cache, both in one launch.

The idea: one program a token copies its K and V, strided views of the qkv product allowed, to the token's slot. Two
``index_copy_`` calls do the same with two launches. Runs on the compute stream, before the layer attends.
"""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_kv", "write_kv_reference"]


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv_kernel(
    k,
    v,
    keys,
    values,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    slot_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, PADDED_HEADS)[:, None]
    d = tl.arange(0, PADDED_DIM)[None, :]
    inside = (h < NUM_HEADS) & (d < HEAD_DIM)
    to = tl.load(slot_mapping + token) * slot_stride + h * kv_head_stride + d
    new_k = tl.load(k + token * k_token_stride + h * k_head_stride + d, mask=inside)
    new_v = tl.load(v + token * v_token_stride + h * v_head_stride + d, mask=inside)
    tl.store(keys + to, new_k.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + to, new_v.to(values.dtype.element_ty), mask=inside)


def write_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """Write one layer's new keys and values at their slots, in place, on the current stream.

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]``; any strides with unit stride in ``head_dim``.
        v: the same for values.
        keys: one layer of the cache, ``[num_slots, num_kv_heads, head_dim]``.
        values: the same for values.
        slot_mapping: ``[num_tokens]``, int64. Padding tokens may share a slot of the reserved block, nothing else may.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k.shape == v.shape
    assert keys.shape == values.shape
    assert keys.stride() == values.stride()
    assert k.stride(2) == v.stride(2) == keys.stride(2) == 1
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        keys,
        values,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        keys.stride(0),
        keys.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def write_kv_reference(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """What :func:`write_kv` does, in plain torch."""
    keys.index_copy_(0, slot_mapping, k.to(keys.dtype))
    values.index_copy_(0, slot_mapping, v.to(values.dtype))
