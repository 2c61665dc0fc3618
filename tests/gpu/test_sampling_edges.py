"""The edges of sampling on a CUDA device: the tokens that must come of them, in vocabularies of real models."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gapless.engine.device_kernels import device_kernels
from gapless.sampling.drawing import draw_tokens
from gapless.sampling.sampler import largest_logits
from unit.kernels.draw_edges import check_draws, check_sampler

pytestmark = pytest.mark.gpu

VOCABULARIES = [32_000, 49_152, 50_257, 128_256, 151_936]


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_kernels_at_the_edges(vocab_size: int) -> None:
    kernels = device_kernels(torch.device("cuda"))
    check_draws(kernels.draw, kernels.largest, vocab_size=vocab_size, device="cuda")


@pytest.mark.parametrize("vocab_size", [50_257, 151_936])
def test_plain_torch_at_the_edges(vocab_size: int) -> None:
    check_draws(draw_tokens, largest_logits, vocab_size=vocab_size, device="cuda")


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_step_at_the_edges_has_the_outcome_of_the_cpu(vocab_size: int) -> None:
    kernels, plain = (device_kernels(torch.device(name)) for name in ("cuda", "cpu"))
    check_sampler(kernels, plain, vocab_size=vocab_size, device="cuda")
