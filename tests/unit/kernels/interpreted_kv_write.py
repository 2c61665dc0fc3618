"""The KV write kernel in Triton's interpreter against ``index_copy_`` (see test_kernels_interpreted)."""

import pytest
import torch

from gapless.kernels.kv_write import write_kv, write_kv_reference


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (2, 80), (3, 96), (8, 128)])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_writes_exactly_the_named_slots(num_heads: int, head_dim: int, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    # K and V as views of a fused product, whose q comes first.
    qkv = torch.randn((num_tokens, 4 * num_heads, head_dim), generator=generator)
    k, v = qkv[:, 2 * num_heads : 3 * num_heads], qkv[:, 3 * num_heads :]
    before = torch.randn((2, 40, num_heads, head_dim), generator=generator)
    slots = torch.randperm(40, generator=generator)[:num_tokens]
    expected = before.clone()
    write_kv_reference(k, v, expected[0], expected[1], slots)
    result = before.clone()
    write_kv(k, v, result[0], result[1], slots)
    assert result.equal(expected)
    assert not result.equal(before)
