"""The edges of sampling in Triton's interpreter and in plain torch (see test_kernels_interpreted)."""

import pytest
import torch

import gapless.kernels.draw
import gapless.kernels.step_edges
from gapless.engine.device_kernels import DeviceKernels, device_kernels
from gapless.kernels.draw import draw_tokens_triton
from gapless.kernels.launch import compile_only
from gapless.kernels.step_edges import TritonEdges, largest_logits_triton
from gapless.layers.attention import TorchAttention
from gapless.layers.ops import TorchOps
from gapless.sampling.penalties import apply_penalties
from unit.kernels.draw_edges import check_draws, check_sampler

PLAIN = device_kernels(torch.device("cpu"))
OURS = DeviceKernels(
    attention=TorchAttention(),
    ops=TorchOps(),
    draw=draw_tokens_triton,
    penalties=apply_penalties,
    largest=largest_logits_triton,
    edges=TritonEdges(),
    compile_only=compile_only,
)


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, and rows with more candidates than are copied out, in a vocabulary the interpreter can do."""
    monkeypatch.setattr(gapless.kernels.draw, "_BLOCK", 128)
    monkeypatch.setattr(gapless.kernels.draw, "_MAX_CANDIDATES", 128)
    monkeypatch.setattr(gapless.kernels.step_edges, "_VOCAB_BLOCK", 64)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")
def test_the_kernels_at_the_edges() -> None:
    check_draws(draw_tokens_triton, largest_logits_triton, vocab_size=203, device="cpu")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow encountered:RuntimeWarning")
def test_a_step_at_the_edges() -> None:
    check_sampler(OURS, PLAIN, vocab_size=203, device="cpu")
