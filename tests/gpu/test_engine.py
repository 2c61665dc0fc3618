"""The engine on a CUDA device: every depth runs the same steps and gives the same tokens, without a hidden sync."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gapless.config import EngineConfig
from gapless.engine.assembly import build_engine
from gapless.engine.request import EngineRequest
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError
from gapless.pipeline.batch import ScheduledBatch
from gapless.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

Outputs = dict[int, list[int]]
Shapes = list[tuple[int, int]]


class Collector:
    def __init__(self, wanted: int) -> None:
        self.outputs: Outputs = {}
        self.error: EngineDeadError | None = None
        self.done = threading.Event()
        self._wanted = wanted

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        self.outputs.update({u.request_id: u.token_ids for u in updates if u.finish_reason is not None})
        if len(self.outputs) == self._wanted:
            self.done.set()

    def engine_died(self, error: EngineDeadError) -> None:
        self.error = error
        self.done.set()


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(requests: list[EngineRequest], **options: object) -> tuple[Outputs, Shapes, int]:
    shapes: Shapes = []

    def note(batch: ScheduledBatch) -> None:
        shapes.append((len(batch.input_ids), len(batch.rows)))

    collector = Collector(len(requests))
    config = EngineConfig.from_options(
        {"device": "cuda", "load_format": "dummy", "max_model_len": 512, "num_blocks": 2048, **options}
    )
    built = build_engine("tiny-llama", config, collector, on_submit=note)
    try:
        with no_host_sync():
            built.engine.submit(requests, lambda ids: None)
            assert collector.done.wait(120)
        assert collector.error is None, collector.error
        return collector.outputs, shapes, built.engine.counters().preemptions
    finally:
        built.engine.shutdown()


def requests(count: int, *, sampled: bool) -> list[EngineRequest]:
    return [
        EngineRequest(
            prompt_token_ids=[index, *range(1 + index % 3, 3 + (index * 29) % 90)],
            params=SamplingParams(
                temperature=0.9 if sampled and index % 2 else 0.0,
                top_k=20 if index % 4 == 1 else 0,
                top_p=0.9 if index % 4 == 3 else 1.0,
                min_tokens=2 if index % 5 == 0 else 0,
                seed=index,
                max_tokens=2 + (index * 7) % 40,
            ),
            stop_token_ids=frozenset({3}) if index % 5 == 0 else frozenset(),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sampled", [False, True])
def test_depths_run_the_same_steps_and_give_the_same_tokens(dtype: str, sampled: bool) -> None:
    work = [r for r in requests(40, sampled=sampled) if not r.stop_token_ids]
    first, first_shapes, _ = run(work, depth=1, dtype=dtype, enable_prefix_caching=False)
    for depth in (2, 3):
        outputs, shapes, _ = run(work, depth=depth, dtype=dtype, enable_prefix_caching=False)
        assert shapes == first_shapes
        assert outputs == first


def test_a_tight_pool_preempts_and_gives_the_tokens_of_an_ample_one() -> None:
    """In fp32 and greedy, with stop tokens, chunked prefill and the prefix cache on."""
    work = requests(24, sampled=False)
    ample, _, none = run(work, depth=2, dtype="float32")
    tight, _, some = run(work, depth=3, dtype="float32", num_blocks=24, max_model_len=256, chunk_size=16)
    assert none == 0
    assert some > 0
    assert tight == ample
