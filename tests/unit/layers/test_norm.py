"""RMSNorm: the formula, weights for each head, and values whose square no half type can hold."""

import pytest
import torch

from gapless.layers.norm import rms_norm


def by_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("weight_shape", [(32,), (3, 32)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_equals_the_formula(weight_shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 32, generator=generator).to(dtype)
    weight = (1 + 0.3 * torch.randn(weight_shape, generator=generator)).to(dtype)
    got = rms_norm(x, weight, 0.1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_formula(x, weight, 0.1), atol=bound, rtol=bound)


@pytest.mark.parametrize("weight_shape", [(320,), (2, 320)])
def test_c51_squares_beyond_fp16(weight_shape: tuple[int, ...]) -> None:
    x = torch.zeros(1, 2, 320, dtype=torch.float16)
    x[:, :, 7] = 2000.0
    got = rms_norm(x, torch.ones(weight_shape, dtype=torch.float16), 1e-20)
    assert (x.square().mean(-1)).isinf().all()
    torch.testing.assert_close(got[0, :, 7].float(), torch.full((2,), 320**0.5), atol=1e-2, rtol=0)
