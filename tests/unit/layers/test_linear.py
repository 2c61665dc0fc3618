"""A linear layer answers the same before and after packing."""

import pytest
import torch
from torch.nn import functional as F

from gapless.layers.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_packing_changes_nothing(dtype: torch.dtype, bound: float, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 24, generator=generator).to(dtype)
    offset = torch.randn(50, generator=generator).to(dtype) if bias else None
    layer = Linear(weight, offset)
    size = layer.nbytes
    layer.pack()
    layer.pack()
    assert layer.nbytes == size == (50 * 24 + 50 * bias) * dtype.itemsize
    for rows in (0, 1, 2, 16, 33):
        x = torch.randn(rows, 24, generator=generator).to(dtype)
        want = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(layer(x).double(), want, atol=bound, rtol=bound)


def test_unpacked_again_it_can_be_loaded_anew() -> None:
    layer = Linear.empty(4, 3, bias=False, dtype=torch.float32, device=torch.device("cpu"))
    for value in (1.0, 2.0):
        layer.unpack()
        layer.weight.fill_(value)
        layer.pack()
        assert layer(torch.ones(2, 3)).tolist() == [[3 * value] * 4] * 2


def test_a_strided_input() -> None:
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    layer = Linear(weight.clone())
    layer.pack()
    wide = torch.randn(10, 12, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(wide[::2, :6]), wide[::2, :6] @ weight.T)
