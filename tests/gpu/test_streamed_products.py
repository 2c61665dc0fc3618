"""Products whose weights are streamed against plain torch in fp32, launched early and not, and replayed."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from unit.kernels.paged_batches import relative_error

pytest.importorskip("triton")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a CUDA device of compute capability 9.0", allow_module_level=True)

from gapless.kernels.fused_products import MAX_ARRIVALS
from gapless.kernels.streamed_products import streamed_gate, streamed_product, streamed_residual
from gapless.kernels.tuned_table import StreamedTile

pytestmark = pytest.mark.gpu

NUM_TOKENS = [1, 5, 16, 17, 32, 33, 64]
STAGES = {16: 6, 32: 5, 64: 4}
# One rounding of the result to bf16, and of what it was made of.
ROUNDED = 6e-3


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(torch.bfloat16)


def tile(num_tokens: int, splits: int) -> StreamedTile:
    stages = next(stages for tokens, stages in STAGES.items() if num_tokens <= tokens)
    return StreamedTile(splits=splits, num_stages=stages)


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("dependent", [False, True])
def test_streamed_product(num_tokens: int, splits: int, dependent: bool) -> None:
    x, weight = random(num_tokens, 2048), random(1536, 2048, scale=0.02)
    out = torch.full((splits, num_tokens, 1536), torch.nan, device="cuda")
    streamed_product(x, weight, out, tile(num_tokens, splits), dependent=dependent)
    assert relative_error(out.sum(0), x.float() @ weight.float().T) < 1e-5


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize(("splits", "in_features"), [(1, 256), (2, 4096), (2, 14336), (4, 2560)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_streamed_residual(num_tokens: int, splits: int, in_features: int, has_bias: bool) -> None:
    x, weight = random(num_tokens, in_features), random(4096, in_features, scale=0.02)
    hidden, norm = random(num_tokens, 4096), random(4096)
    bias = random(4096) if has_bias else None
    arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device="cuda")
    right = hidden.float() + F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    prepared = streamed_residual(x, weight, bias, hidden, norm, arrivals, tile(num_tokens, splits), dependent=True)
    assert relative_error(hidden, right) < ROUNDED
    assert relative_error(prepared.weighted, right * norm.float()) < ROUNDED
    assert relative_error(prepared.squares.sum(0), hidden.float().square().sum(1)) < 1e-5
    assert not arrivals.any()


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("num_squares", [None, 1, 48, 64])
def test_streamed_gate(num_tokens: int, num_squares: int | None) -> None:
    hidden, weight = random(num_tokens, 3072), random(2 * 1024, 3072, scale=0.02)
    x, squares = hidden.float(), None
    if num_squares is not None:
        squares = x.square().unflatten(1, (num_squares, -1)).sum(2).T.contiguous() if num_squares != 64 else None
        if squares is None:
            squares = torch.rand((64, num_tokens), device="cuda") * 48
        x = x * (squares.sum(0) / 3072 + 1e-5).rsqrt()[:, None]
    gate, up = (x @ weight.float().T).chunk(2, 1)
    out = streamed_gate(hidden, squares, weight, 1e-5, tile(num_tokens, 1), dependent=True)
    assert relative_error(out, F.silu(gate) * up) < 2 * ROUNDED


@pytest.mark.parametrize("num_tokens", [3, 32, 64])
def test_a_row_of_products_gives_equal_bits_each_time(num_tokens: int) -> None:
    """Launched early, each beside the end of the one before, in a graph: what one reads, the one before has written."""
    qkv, o, gate_up, down = random(6144, 4096), random(4096, 4096), random(28672, 4096), random(4096, 14336)
    start, attended, norm = random(num_tokens, 4096), random(num_tokens, 4096), random(4096)
    arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device="cuda")
    one, two = tile(num_tokens, 1), tile(num_tokens, 2)

    def run(*, dependent: bool) -> list[Tensor]:
        hidden = start.clone()
        for _ in range(3):
            prepared = streamed_residual(attended, o, None, hidden, norm, arrivals, two, dependent=dependent)
            x = streamed_gate(prepared.weighted, prepared.squares, gate_up, 1e-5, one, dependent=dependent)
            prepared = streamed_residual(x, down, None, hidden, norm, arrivals, two, dependent=dependent)
            heads = torch.empty((1, num_tokens, 6144), device="cuda")
            streamed_product(prepared.weighted, qkv, heads, one, dependent=dependent)
        return [hidden, prepared.weighted, prepared.squares, heads]

    expected = run(dependent=False)
    assert all(each.isfinite().all() for each in expected)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        results = run(dependent=True)
    for _ in range(50):
        for each in results:
            each.zero_()
        graph.replay()
        assert all(a.equal(b) for a, b in zip(expected, results, strict=True))
