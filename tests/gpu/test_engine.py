"""The engine on a CUDA device: every depth runs the same steps and gives the same tokens, without a hidden sync."""

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from fixtures.watched_engine import WatchedEngine, mixed_requests
from gapless.engine.request import EngineRequest

pytestmark = pytest.mark.gpu


def run(requests: list[EngineRequest], **options: Any) -> tuple[list[list[int]], list[tuple[int, int]], int]:
    with WatchedEngine(**options) as engine:
        outputs = engine.run(requests)
        return outputs, engine.shapes, engine.built.engine.counters().preemptions


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sampled", [False, True])
def test_depths_run_the_same_steps_and_give_the_same_tokens(dtype: str, sampled: bool) -> None:
    work = mixed_requests(40, sampled=sampled, stops=False)
    first, first_shapes, _ = run(work, depth=1, dtype=dtype, enable_prefix_caching=False)
    for depth in (2, 3):
        outputs, shapes, _ = run(work, depth=depth, dtype=dtype, enable_prefix_caching=False)
        assert shapes == first_shapes
        assert outputs == first


def test_a_tight_pool_preempts_and_gives_the_tokens_of_an_ample_one() -> None:
    """In fp32 and greedy, with stop tokens, chunked prefill and the prefix cache on."""
    work = mixed_requests(24, sampled=False)
    ample, _, none = run(work, depth=2, dtype="float32")
    tight, _, some = run(work, depth=3, dtype="float32", num_blocks=24, max_model_len=256, chunk_size=16)
    assert none == 0
    assert some > 0
    assert tight == ample
