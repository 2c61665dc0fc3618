"""The kernels of a layer on a CUDA device against plain torch, in each dtype, launched early and not."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unit.kernels.paged_batches import relative_error

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gapless.kernels import elementwise
from gapless.kernels.dependent_launch import has_dependent_launch
from gapless.kernels.layer_ops import TritonOps
from gapless.kernels.skinny import SkinnyTile, skinny_product
from gapless.kernels.tuned_table import ProductKey, TunedTable
from gapless.layers import ops as reference
from gapless.layers.activation import silu_and_mul
from gapless.layers.linear import Linear
from gapless.layers.ops import LayerOps, Residual, TorchOps
from gapless.layers.rope import Rotation

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
DTYPES = list(TOLERANCE)
LAUNCHES = [False, True] if torch.cuda.is_available() and has_dependent_launch(torch.device("cuda")) else [False]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def rotation_of(num_tokens: int, head_dim: int) -> Rotation:
    angles = torch.rand((num_tokens, 1, head_dim // 2), device="cuda") * 6.3
    return Rotation(cos=torch.cat((angles.cos(), angles.cos()), -1), sin=torch.cat((-angles.sin(), angles.sin()), -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dependent", LAUNCHES)
def test_rotate_and_write(dtype: torch.dtype, head_dim: int, has_norm: bool, dependent: bool) -> None:
    qkv = random(500, 48, head_dim, dtype=dtype)
    norm = random(40, head_dim, dtype=dtype) if has_norm else None
    rotation = rotation_of(500, head_dim)
    slots = torch.randperm(2000, device="cuda")[:500]
    result = random(2, 2000, 8, head_dim, dtype=dtype)
    expected = result.clone()
    rest = (norm, 1e-5, rotation)
    q = elementwise.rotate_and_write(qkv[None], *rest, result[0], result[1], slots, dependent=dependent)
    expected_q = reference.rotate_and_write(qkv, *rest, expected[0], expected[1], slots)
    assert relative_error(q, expected_q) < TOLERANCE[dtype]
    assert relative_error(result, expected) < TOLERANCE[dtype]
    assert result[1].equal(expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [576, 4096])
@pytest.mark.parametrize("dependent", LAUNCHES)
def test_norm_and_gate(dtype: torch.dtype, size: int, dependent: bool) -> None:
    hidden, delta = random(2, 33, size, dtype=dtype)
    weight = random(size, dtype=dtype)
    ours, expected = hidden.clone(), hidden.clone()
    result = elementwise.add_rms_norm(Residual(ours, delta), weight, 1e-5, dependent=dependent)
    right = reference.add_rms_norm(Residual(expected, delta), weight, 1e-5)
    assert ours.equal(expected)
    assert relative_error(result, right) < TOLERANCE[dtype]
    gate_up = random(33, 2 * size, dtype=dtype)
    expected = silu_and_mul(gate_up.clone())
    assert relative_error(elementwise.silu_and_mul(gate_up, dependent=dependent), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40, 64, 100, 128])
@pytest.mark.parametrize("dependent", LAUNCHES)
def test_skinny_product(num_tokens: int, dependent: bool) -> None:
    dtype = torch.bfloat16
    x, weight = random(num_tokens, 2048, dtype=dtype), random(1536, 2048, dtype=dtype)
    exact = F.linear(x.float(), weight.float())
    for block_n, block_k, num_warps in ((64, 128, 4), (128, 64, 4), (128, 128, 8)):
        for splits in (1, 4):
            tile = SkinnyTile(block_n=block_n, block_k=block_k, splits=splits, num_warps=num_warps, num_stages=3)
            out = torch.empty((splits, num_tokens, 1536), device="cuda")
            skinny_product(x, weight, out, tile, dependent=dependent)
            assert relative_error(out.sum(0), exact) < 1e-5  # not rounded to bf16 at all


class Layer:
    """A layer's weights in bf16 and its four operations in a row, as a decoder calls them."""

    hidden, heads, kv_heads, dim, mlp = 1024, 8, 2, 128, 1536

    def __init__(self, *, bias: bool, qk_norm: bool) -> None:
        def linear(rows: int, columns: int, *, bias: bool = False) -> Linear:
            weight = random(rows, columns, dtype=torch.bfloat16, scale=0.03)
            return Linear(weight, random(rows, dtype=torch.bfloat16) if bias else None)

        self.qkv = linear((self.heads + 2 * self.kv_heads) * self.dim, self.hidden, bias=bias)
        self.out = linear(self.hidden, self.heads * self.dim, bias=bias)
        self.gate_up = linear(2 * self.mlp, self.hidden)
        self.down = linear(self.hidden, self.mlp)
        self.head = linear(512, self.hidden)
        self.norms = [1 + random(self.hidden, dtype=torch.bfloat16, scale=0.3) for _ in range(3)]
        self.qk_norm = 1 + random(self.heads + self.kv_heads, self.dim, dtype=torch.bfloat16) if qk_norm else None

    def table(self) -> TunedTable:
        tiles = {}
        for tokens in (16, 32, 64, 128):
            for kind, linear, splits in (
                ("heads", self.qkv, 4), ("residual", self.out, 2), ("residual", self.down, 3),
                ("gate", self.gate_up, 1), ("logits", self.head, 1),
            ):  # fmt: skip
                rows, columns = linear.shape
                tiles[ProductKey(kind=kind, out_features=rows, in_features=columns, tokens=tokens)] = SkinnyTile(
                    block_n=64, block_k=128, splits=splits, num_warps=4, num_stages=3
                )
        return TunedTable(tiles)

    def run(self, ops: LayerOps, start: Tensor, rotation: Rotation, slots: Tensor) -> list[Tensor]:
        cache = torch.zeros((2, 500, self.kv_heads, self.dim), dtype=torch.bfloat16, device="cuda")
        residual = Residual(start.clone())
        results = []
        for _ in range(2):
            q = ops.project_heads(
                residual, self.norms[0], 1e-5, self.qkv, self.qk_norm, rotation, cache[0], cache[1], slots
            )
            residual = ops.add_product(residual, q.flatten(1), self.out, self.norms[1])
            x = ops.gated_product(residual, self.norms[1], 1e-5, self.gate_up)
            residual = ops.add_product(residual, x, self.down, self.norms[0])
            results += [q, x]
        tokens = torch.arange(len(start) - 1, -1, -1, device="cuda")
        last = ops.final_norm(residual, self.norms[2], 1e-5, tokens)
        return [*results, cache, last, ops.logits(last, self.head)]


@pytest.mark.parametrize("num_tokens", [1, 16, 24, 33, 64, 100, 128, 129])
@pytest.mark.parametrize("dependent", LAUNCHES)
@pytest.mark.parametrize(("bias", "qk_norm"), [(False, False), (True, True)])
def test_two_layers_with_and_without_our_products(num_tokens: int, dependent: bool, bias: bool, qk_norm: bool) -> None:
    device = torch.device("cuda")
    layer = Layer(bias=bias, qk_norm=qk_norm)
    start = random(num_tokens, layer.hidden, dtype=torch.bfloat16)
    inputs = (start, rotation_of(num_tokens, layer.dim), torch.randperm(500, device="cuda")[:num_tokens])
    fused = TritonOps(device, table=layer.table(), dependent_launch=dependent)
    ours = layer.run(fused, *inputs)
    expected, library = layer.run(TorchOps(), *inputs), layer.run(TritonOps(device), *inputs)
    for right, mine, other in zip(expected, ours, library, strict=True):
        assert relative_error(mine, right.float()) < 2e-2
        assert relative_error(other, right.float()) < 2e-2
    for _ in range(5):  # which program arrives last varies, the bits do not
        assert all(map(torch.equal, layer.run(fused, *inputs), ours))
