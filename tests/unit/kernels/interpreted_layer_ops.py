"""The kernels of a layer in Triton's interpreter against plain torch (see test_kernels_interpreted)."""

import pytest
import torch

from gapless.kernels import elementwise
from gapless.kernels.fused_products import MAX_ARRIVALS, fused_gate, fused_residual
from gapless.kernels.skinny import SkinnyTile, skinny_product
from gapless.layers import ops as reference
from gapless.layers.activation import silu_and_mul
from gapless.layers.linear import Linear
from gapless.layers.ops import PreparedNorm, Residual
from gapless.layers.rope import RopeSpec, RopeTable


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [64, 96, 576])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("has_delta", [False, True])
def test_add_rms_norm(size: int, num_tokens: int, has_delta: bool) -> None:
    hidden, weight = random(num_tokens, size), random(size, seed=1)
    delta = random(num_tokens, size, seed=2) if has_delta else None
    ours, expected = hidden.clone(), hidden.clone()
    result = elementwise.add_rms_norm(Residual(ours, delta), weight, 1e-5)
    right = reference.add_rms_norm(Residual(expected, delta), weight, 1e-5)
    torch.testing.assert_close(result, right, rtol=1e-5, atol=1e-6)
    assert ours.equal(expected)
    assert ours.equal(hidden) is not has_delta


@pytest.mark.parametrize("num_tokens", [1, 5, 69])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 32), (3, 1, 80), (2, 2, 64), (9, 3, 64)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_addends", "is_prepared", "has_bias"), [(1, False, False), (3, True, False), (2, True, True)]
)
def test_rotate_and_write(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    num_addends: int,
    is_prepared: bool,
    has_bias: bool,
) -> None:
    num_slots, hidden_size = 99, 40
    heads = num_heads + 2 * num_kv_heads
    addends = random(num_addends, num_tokens, heads, head_dim)
    norm = 1 + 0.3 * random(num_heads + num_kv_heads, head_dim, seed=1) if has_norm else None
    bias = random(heads * head_dim, seed=2) if has_bias else None
    squares = random(3, num_tokens, seed=4).square() if is_prepared else None
    product = addends.sum(0)
    if squares is not None:
        product *= (squares.sum(0) / hidden_size + 1e-3).rsqrt()[:, None, None]
    if bias is not None:
        product += bias.view(heads, head_dim)
    inv_freq = tuple(10_000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))
    spec = RopeSpec(kind="default", inv_freq=inv_freq, attention_factor=1.1, max_positions=64)
    rotation = RopeTable(spec, num_positions=64, device=torch.device("cpu")).rotation(
        torch.arange(num_tokens) * 13 % 64
    )
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(5))[:num_tokens]
    before = random(2, num_slots, num_kv_heads, head_dim, seed=3)
    ours, expected = before.clone(), before.clone()
    q = elementwise.rotate_and_write(
        addends, norm, 1e-3, rotation, ours[0], ours[1], slots, squares=squares, bias=bias, hidden_size=hidden_size
    )
    right = reference.rotate_and_write(product, norm, 1e-3, rotation, expected[0], expected[1], slots)
    torch.testing.assert_close(q, right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    untouched = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert ours[:, untouched].equal(before[:, untouched])


@pytest.mark.parametrize("size", [96, 1536])
def test_silu_and_mul(size: int) -> None:
    gate_up = 3 * random(4, 2 * size)
    expected = silu_and_mul(gate_up.clone())
    torch.testing.assert_close(elementwise.silu_and_mul(gate_up), expected, rtol=1e-5, atol=1e-6)


def linear(rows: int, columns: int, *, seed: int, bias: bool = False) -> Linear:
    return Linear(0.2 * random(rows, columns, seed=seed), random(rows, seed=seed + 1) if bias else None)


def prepared(hidden: torch.Tensor, norm: torch.Tensor, parts: int) -> PreparedNorm:
    squares = hidden.square().unflatten(1, (parts, -1)).sum(2).T.contiguous()
    return PreparedNorm(hidden * norm, squares)


@pytest.mark.parametrize("num_tokens", [1, 16, 33])
@pytest.mark.parametrize("splits", [1, 2, 3])
def test_skinny_product(num_tokens: int, splits: int) -> None:
    x, weight = random(num_tokens, 96), random(64, 96, seed=1)
    tile = SkinnyTile(block_n=32, block_k=16, splits=splits, num_warps=4, num_stages=2)
    out = torch.full((splits, num_tokens, 64), torch.nan)
    skinny_product(x, weight, out, tile)
    torch.testing.assert_close(out.sum(0), torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    part = 96 // splits
    last = torch.nn.functional.linear(x[:, -part:], weight[:, -part:])
    torch.testing.assert_close(out[-1], last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_residual(num_tokens: int, splits: int, has_bias: bool) -> None:
    x, hidden, norm = random(num_tokens, 96), random(num_tokens, 64, seed=1), random(64, seed=2)
    product = linear(64, 96, seed=3, bias=has_bias)
    tile = SkinnyTile(block_n=32, block_k=16, splits=splits, num_warps=4, num_stages=2)
    arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32)
    expected = hidden + product(x)
    begun = fused_residual(x, product.weight, product.bias, hidden, norm, arrivals, tile)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(begun.weighted, expected * norm, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(begun.squares, prepared(expected, norm, 2).squares, rtol=1e-5, atol=1e-5)
    assert not arrivals.any()


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_fused_gate(num_tokens: int, is_prepared: bool) -> None:
    hidden, norm, product = random(num_tokens, 64), random(64, seed=1), linear(2 * 48, 64, seed=2)
    tile = SkinnyTile(block_n=16, block_k=32, splits=1, num_warps=4, num_stages=2)
    begun = prepared(hidden, norm, 4)
    normed = reference.add_rms_norm(Residual(hidden), norm, 1e-3)
    x, squares = (begun.weighted, begun.squares) if is_prepared else (normed, None)
    expected = silu_and_mul(product(normed))
    result = fused_gate(x, squares, product.weight, 1e-3, tile)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
