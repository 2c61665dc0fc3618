"""CUDA graphs give what launching kernel by kernel gives, bit for bit, and cost neither a sync nor memory twice."""

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import MistralConfig

from fixtures.watched_engine import WatchedEngine, mixed_requests, no_host_sync
from gapless.engine.request import EngineRequest
from gapless.kernels.paged_attention import TritonAttention
from gapless.layers.forward_inputs import ForwardInputs
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch, TableChange
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.graphs import CudaRecorder, GraphCounts, GraphedStep
from gapless.pipeline.padding import StepBuckets, decode_buckets
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.cuda import CudaQueues
from gapless.sampling.sampler import Sampler
from gapless.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

MAX_ROWS = 64
BUCKETS = StepBuckets(num_rows=40, decode=decode_buckets(40), mixed=(64, 96, 128))


def counts(engine: WatchedEngine) -> GraphCounts:
    executor = engine.built.executor
    assert isinstance(executor, GraphedStep)
    return executor.counts


def same_length(count: int, *, sampled: bool) -> list[EngineRequest]:
    """Requests that decode side by side for a while; contexts of mixed lengths cross block boundaries."""
    return [
        EngineRequest(
            prompt_token_ids=[(7 * index + count) % 320, *range(1, 2 + (index * 13) % 50)],
            params=SamplingParams(
                temperature=0.9 if sampled and index % 3 == 1 else 0.0,
                top_p=0.9 if index % 2 else 1.0,
                min_tokens=4 if sampled and index % 4 == 0 else 0,
                seed=index,
                max_tokens=20,
            ),
            stop_token_ids=frozenset({5, 300}) if sampled and index % 4 == 0 else frozenset(),
        )
        for index in range(count)
    ]


@pytest.fixture
def sliding_window_model(tmp_path: Path) -> Path:
    config = MistralConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        sliding_window=24,
    )
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_c15_graphs_equal_eager_at_every_batch_size(depth: int, sampled: bool) -> None:
    options: dict[str, Any] = {"depth": depth, "max_rows": MAX_ROWS, "enable_prefix_caching": False}
    with WatchedEngine(cuda_graphs=True, **options) as graphed, WatchedEngine(cuda_graphs=False, **options) as eager:
        assert isinstance(eager.built.executor, DeviceStep)
        seen: set[int] = set()
        for size in range(1, MAX_ROWS + 1):
            work = same_length(size, sampled=sampled)
            outputs = graphed.run(work)
            assert outputs == eager.run(work), f"{size} requests"
            seen.update(token for ids in outputs for token in ids)
        assert len(seen) > 10, "tokens that never vary would show nothing"
        assert graphed.shapes == eager.shapes
        # Every decode bucket was met, and after the first time with each set of buffers it was replayed.
        buckets = [entries for tokens, entries in graphed.shapes if tokens == entries]
        assert {*decode_buckets(MAX_ROWS)} == set(buckets)
        found = counts(graphed)
        assert found.captured - found.captured_mixed <= depth * len(decode_buckets(MAX_ROWS))
        assert found.replayed > len(buckets) / 2


def arrivals(first: int) -> list[EngineRequest]:
    """A few requests that decode for long, and prompts that join them one by one, with every length from ``first``."""
    decodes = [
        EngineRequest(prompt_token_ids=[9, 40 + index], params=SamplingParams(temperature=0.0, max_tokens=90))
        for index in range(3)
    ]
    prompts = [
        EngineRequest(
            prompt_token_ids=[(length * 31 + i * i) % 320 for i in range(length)],
            params=SamplingParams(
                temperature=0.8 * (length % 3 == 0), seed=length, max_tokens=1 + length % 4, prompt_logprobs=None
            ),
        )
        for length in range(first, first + 30)
    ]
    return decodes + prompts


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_graphs_equal_eager_when_prompts_of_any_length_join_decodes(depth: int) -> None:
    """Only one row is free beside the decodes, so that prompts enter one after another."""
    options: dict[str, Any] = {"depth": depth, "max_rows": 4, "chunk_size": 100, "enable_prefix_caching": False}
    with WatchedEngine(cuda_graphs=True, **options) as graphed, WatchedEngine(cuda_graphs=False, **options) as eager:
        for first in (1, 31, 61, 91, 121):
            work = arrivals(first)
            assert graphed.run(work) == eager.run(work), f"prompts from {first} tokens"
        assert graphed.shapes == eager.shapes
        padded = [batch for batch in graphed.batches if batch.bounds is not None]
        sizes = {len(batch.input_ids) for batch in padded}
        assert sizes >= {16, 32, 64, 128}
        assert all(len(batch.rows) == 4 for batch in padded)
        assert len(padded) > 100
        # The largest was captured at the start, and each size met each set of buffers once before it was replayed.
        assert len(sizes) <= counts(graphed).captured_mixed <= len(sizes) * depth + 1
        assert counts(graphed).replayed > 300


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sliding_window_is_replayed_past_its_edge(depth: int, sliding_window_model: Path) -> None:
    options: dict[str, Any] = {"depth": depth, "max_rows": 16, "enable_prefix_caching": False}
    work = mixed_requests(12, sampled=True)
    with WatchedEngine(sliding_window_model, **options) as graphed:
        outputs = graphed.run(work)
        assert graphed.built.loaded.spec.windows == (24, 24)
        assert counts(graphed).replayed > 10
    with WatchedEngine(sliding_window_model, cuda_graphs=False, **options) as eager:
        assert outputs == eager.run(work)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preemption_and_admission_change_rows_between_replays(depth: int) -> None:
    options: dict[str, Any] = {"depth": depth, "num_blocks": 24, "max_model_len": 256, "chunk_size": 16, "max_rows": 6}
    work = mixed_requests(24, sampled=True)
    with WatchedEngine(**options) as graphed:
        outputs = [graphed.run(work), graphed.run(work)]
        assert graphed.built.engine.counters().preemptions > 0
        assert counts(graphed).replayed > 50
    with WatchedEngine(cuda_graphs=False, **options) as eager:
        assert outputs == [eager.run(work), eager.run(work)]


def test_the_pool_does_not_grow_and_is_as_large_at_depth_2_as_at_depth_1() -> None:
    """Of a model whose intermediates are megabytes; captured in the order in which traffic asks for buckets."""
    sizes = {}
    for depth in (1, 2):
        with WatchedEngine("smollm2-135m", depth=depth, max_rows=64, enable_prefix_caching=False) as engine:
            executor = engine.built.executor
            assert isinstance(executor, GraphedStep)
            assert isinstance(executor.recorder, CudaRecorder)
            first = executor.recorder.pool_bytes
            one_step = EngineRequest(prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=1))
            for size in (3, 40, 17, 64):
                engine.run(same_length(size, sampled=False))
                engine.run([one_step])  # so that the next run begins with the other buffers
                engine.run(same_length(size, sampled=False))
            assert executor.counts.captured_mixed >= 3 * depth
            assert executor.counts.captured - executor.counts.captured_mixed >= 4 * depth
            sizes[depth] = executor.recorder.pool_bytes
            # It was made before the first capture, and the graphs of every size and every set of buffers fit into it.
            # The largest step needs at least the MLP's gate, up and product of 2,048 tokens in bf16 at once.
            needed = 2048 * 3 * engine.built.loaded.spec.intermediate_size * 2
            assert needed < sizes[depth] == first < 4 * needed
    print(f"graph pool: {sizes[1]} bytes at depth 1, {sizes[2]} at depth 2")
    assert sizes[2] == sizes[1]


def test_graphs_of_an_engine_whose_steps_are_all_too_small_for_mixed_sizes() -> None:
    options: dict[str, Any] = {"max_rows": 2, "token_budget": 8}
    work = mixed_requests(4, sampled=False)
    with WatchedEngine(cuda_graphs=True, **options) as graphed, WatchedEngine(cuda_graphs=False, **options) as eager:
        assert graphed.run(work) == eager.run(work)
        assert counts(graphed).captured_mixed == 0
        assert counts(graphed).replayed > 0


def test_other_threads_may_allocate_and_wait_during_a_capture() -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def busy() -> None:
        stream = torch.cuda.Stream()
        try:
            step = 0
            with torch.cuda.stream(stream):
                while not stop.is_set():
                    step += 1
                    # Sizes that no cached block serves, so that the driver is asked for memory.
                    torch.empty(((step % 50) * 7 + 1) << 20, dtype=torch.uint8, device="cuda").fill_(1)
                    event = torch.cuda.Event()
                    event.record()
                    event.synchronize()
        except BaseException as error:
            failures.append(error)

    work = mixed_requests(24, sampled=True, stops=False)
    with WatchedEngine(cuda_graphs=False) as eager:
        expected = eager.run(work)
    other = threading.Thread(target=busy)
    with WatchedEngine() as engine:
        other.start()
        ids: list[list[int]] = []
        try:
            ids = engine.run(work, may_wait=True)
        finally:
            stop.set()
            other.join()
        assert not failures, failures
        assert ids == expected
        assert counts(engine).captured > 5


class DriftingModel:
    """Attention over the paged cache, whose output is the logits: whatever a replay reads wrongly shows in the bits."""

    def __init__(self, num_blocks: int, window: int | None) -> None:
        generator = torch.Generator("cuda").manual_seed(1)
        shape = ((num_blocks + 1) * 16, 2, 64)
        self.keys, self.values = torch.randn((2, *shape), generator=generator, device="cuda").to(torch.bfloat16)
        self._embedding = torch.randn((512, 8, 64), generator=generator, device="cuda").to(torch.bfloat16)
        self._attention = TritonAttention.for_device(torch.device("cuda"))
        self._window = window

    def forward(self, inputs: ForwardInputs) -> Tensor:
        return self.logits(self.hidden_states(inputs).index_select(0, inputs.logits_indices))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        x = self._embedding.index_select(0, inputs.input_ids)
        shift = (inputs.positions * 0.01).to(x.dtype)[:, None, None]
        self.keys.index_copy_(0, inputs.slot_mapping, x[:, :2] + shift)
        self.values.index_copy_(0, inputs.slot_mapping, x[:, 2:4])
        plan = self._attention.plan(inputs, 16)
        return self._attention.attend(x, self.keys, self.values, plan, scale=0.2, window=self._window)


def decode_batch(step: int, size: int, lengths: list[int]) -> ScheduledBatch:
    """One more token for each of ``size`` rows, which have ``lengths``; tokens come by carry-over after the first."""
    builder = BatchBuilder(step)
    for row in range(size):
        start = lengths[row]
        entry = BatchEntry(row, 0, row, start, 1, True, True, step > 0, step)
        builder.add_token(entry, 0 if step else row + 1)
        columns = range(start // 16 + 1) if step == 0 else [start // 16] if start % 16 == 0 else []
        builder.table_changes += [TableChange(row, column, 1 + row * 40 + column) for column in columns]
        lengths[row] += 1
    return BUCKETS.pad(builder.build())


def mixed_batch(step: int, prompt: int, lengths: list[int]) -> ScheduledBatch:
    """One more token for each of the first rows, and a prompt of another length in each step for a row of its own."""
    builder = BatchBuilder(step)
    for row in range(len(lengths)):
        start = lengths[row]
        builder.add_token(BatchEntry(row, 0, row, start, 1, True, True, step > 0, step), 0 if step else row + 1)
        columns = range(start // 16 + 1) if step == 0 else [start // 16] if start % 16 == 0 else []
        builder.table_changes += [TableChange(row, column, 1 + row * 40 + column) for column in columns]
        lengths[row] += 1
    ids = np.arange(step, step + prompt, dtype=np.int32)
    builder.table_changes += [TableChange(39, column, 1 + 39 * 40 + column) for column in range(-(-prompt // 16))]
    builder.add_chunk(BatchEntry(39, 0, 39, 0, prompt, True, step % 2 == 0, False, 0), ids)
    return BUCKETS.pad(builder.build())


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("size", [1, 7, 33])
def test_logits_and_tokens_of_a_replay_are_those_of_a_launch(size: int, kind: str, window: int | None) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    queues = CudaQueues(device)
    runs = []
    for graphs in (False, True):
        step = DeviceStep(
            model=DriftingModel(40 * 40, window),
            sampler=Sampler(max_rows=40, device=device),
            max_rows=40,
            max_blocks_per_row=40,
            block_size=16,
            device=device,
        )
        executor = GraphedStep(step, CudaRecorder(), BUCKETS) if graphs else step
        limits = BufferLimits(max_tokens=160, max_rows=40, max_changes=800, max_masked=40)
        sets = [StepBuffers(queues, limits), StepBuffers(queues, limits)]
        stream = torch.cuda.Stream()
        lengths = [(row * 37) % 300 // 16 * 16 for row in range(size)]
        kept = []
        torch.cuda.synchronize()
        for index in range(40):
            buffers = sets[index % 2]
            if kind == "decode":
                batch = decode_batch(index, size, lengths)
            else:
                num_tokens = BUCKETS.mixed[index // 2 % 3] - index % 7
                batch = mixed_batch(index, num_tokens - size, lengths)
            layout = buffers.write(batch)
            with torch.inference_mode(), torch.cuda.stream(stream), no_host_sync():
                buffers.device_in.copy_(buffers.host_in, non_blocking=True)
                logits = executor.forward(batch, layout, buffers)
                kept.append(logits.clone() if kind == "mixed" else logits[:size].clone())
                executor.sample(logits, batch, layout, buffers)
                kept.append(buffers.output_view(len(batch.sample_rows))[:size].clone())
            stream.synchronize()  # the host input is written again
        if graphs:
            assert isinstance(executor, GraphedStep)
            captured, mixed = (2, 0) if kind == "decode" else (6, 6)
            assert executor.counts == GraphCounts(captured=captured, captured_mixed=mixed, replayed=40 - captured)
        runs.append(kept)
    assert all(launched.equal(replayed) for launched, replayed in zip(*runs, strict=True))
    assert len({int(tokens[0]) for tokens in runs[0][1::2]}) > 1


def test_garbage_of_an_earlier_engine_does_not_spoil_a_capture() -> None:
    """Graphs in a cycle of dead objects would be destroyed by the next collection, which a capture must not meet."""

    def cycle_with_a_graph() -> None:
        tensor = torch.zeros(8, device="cuda")
        cycle: list[object] = [CudaRecorder().record(lambda: tensor.add_(1))]
        cycle.append(cycle)

    tensor = torch.zeros(8, device="cuda")

    def work() -> None:
        tensor.add_(1)
        assert not gc.isenabled()
        _ = [[i] for i in range(5000)]  # enough objects for a collection

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(20):
            cycle_with_a_graph()
        graph = CudaRecorder().record(work)
        graph.replay()
    stream.synchronize()
    assert gc.isenabled()
    assert tensor.eq(1).all()
