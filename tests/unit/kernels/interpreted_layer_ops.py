"""The layer kernels in Triton's interpreter against plain torch (see test_kernels_interpreted)."""

import pytest
import torch

from gapless.kernels.layer_ops import TritonOps
from gapless.layers.ops import TorchOps
from gapless.layers.rope import RopeSpec, RopeTable

OURS, REFERENCE = TritonOps(), TorchOps()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [64, 96, 576])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(size: int, num_tokens: int, has_delta: bool) -> None:
    hidden, weight = random(num_tokens, size), random(size, seed=1)
    delta = random(num_tokens, size, seed=2) if has_delta else None
    ours, expected = hidden.clone(), hidden.clone()
    result = OURS.add_rms_norm(ours, delta, weight, 1e-5)
    reference = REFERENCE.add_rms_norm(expected, delta, weight, 1e-5)
    torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)
    assert ours.equal(expected)
    assert ours.equal(hidden) is not has_delta


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 80), (2, 2, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotate_and_write(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool) -> None:
    num_tokens, num_slots = 5, 24
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    norm = 1 + 0.3 * random(num_heads + num_kv_heads, head_dim, seed=1) if has_norm else None
    inv_freq = tuple(10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    spec = RopeSpec(kind="default", inv_freq=inv_freq, attention_factor=1.1, max_positions=64)
    rotation = RopeTable(spec, num_positions=64, device=torch.device("cpu")).rotation(torch.tensor([0, 1, 5, 33, 63]))
    slots = torch.tensor([3, 23, 0, 7, 11])
    before = random(2, num_slots, num_kv_heads, head_dim, seed=3)
    ours, expected = before.clone(), before.clone()
    q = OURS.rotate_and_write(qkv, norm, 1e-6, rotation, ours[0], ours[1], slots)
    reference = REFERENCE.rotate_and_write(qkv, norm, 1e-6, rotation, expected[0], expected[1], slots)
    torch.testing.assert_close(q, reference, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    untouched = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert ours[:, untouched].equal(before[:, untouched])
    assert ours[1].equal(expected[1])


@pytest.mark.parametrize("size", [96, 1536])
def test_silu_and_mul(size: int) -> None:
    gate_up = 3 * random(4, 2 * size)
    expected = REFERENCE.silu_and_mul(gate_up.clone())
    torch.testing.assert_close(OURS.silu_and_mul(gate_up), expected, rtol=1e-5, atol=1e-6)
