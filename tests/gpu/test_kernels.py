"""The kernels on a CUDA device, in bf16, fp16 and fp32, against the fp32 reference in plain torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unit.kernels.paged_batches import Entry, Layout, PagedBatch, make_batch, random_entries, relative_error

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from gapless.kernels.attention_tiles import WHOLE_TILE
from gapless.kernels.elementwise import rotate_and_write
from gapless.kernels.gluon_support import can_run_gluon
from gapless.kernels.paged_attention import TritonAttention, paged_attention_reference
from gapless.kernels.work_list import TileClass, build_work_list, work_list_reference
from gapless.layers.rope import Rotation

pytestmark = pytest.mark.gpu

# Relative error of the norm. Inputs are exact in their dtype; weights and the output are rounded to it.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
DTYPES = list(TOLERANCE)
LLAMA = Layout(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16)


@pytest.fixture
def backend() -> TritonAttention:
    return TritonAttention.for_device(torch.device("cuda"))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN or the largest integer, so reading one before writing it shows."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1, device="cuda").isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cuda_batch(entries: list[Entry], layout: Layout, *, seed: int, padding: int = 0) -> PagedBatch:
    return make_batch(entries, layout, seed=seed, padding=padding, device="cuda")


def attend(backend: TritonAttention, batch: PagedBatch, window: int | None = None) -> Tensor:
    plan = backend.plan(batch.inputs, batch.layout.block_size)
    out = torch.full((batch.q.shape[0], batch.q.shape[1] * batch.q.shape[2]), float("nan"), device="cuda")
    out = out.to(batch.q.dtype)
    return backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=window, out=out)


def reference(batch: PagedBatch, window: int | None = None) -> Tensor:
    return paged_attention_reference(
        batch.q, batch.keys, batch.values, batch.inputs, batch.layout.block_size, scale=batch.scale, window=window
    )


def layout_of(dtype: torch.dtype, **changes: int) -> Layout:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 16} | changes
    return Layout(**sizes, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 1, 100])
def test_random_ragged_batches(backend: TritonAttention, dtype: torch.dtype, kind: str, window: int | None) -> None:
    for seed in range(4):
        batch = cuda_batch(random_entries(kind, seed, most=3000), layout_of(dtype), seed=seed, padding=seed % 3)
        with poisoned_memory():
            result = attend(backend, batch, window)
        assert relative_error(result, reference(batch, window)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 70])
def test_head_sizes(backend: TritonAttention, dtype: torch.dtype, head_dim: int, window: int | None) -> None:
    entries = [Entry(query_len=1, seq_len=1500), Entry(query_len=300, seq_len=700), Entry(query_len=1, seq_len=1)]
    batch = cuda_batch(entries, layout_of(dtype, head_dim=head_dim), seed=head_dim)
    assert relative_error(attend(backend, batch, window), reference(batch, window)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (7, 1), (12, 4), (32, 1), (24, 3)])
def test_any_number_of_query_heads_for_a_kv_head(
    backend: TritonAttention, dtype: torch.dtype, num_heads: int, num_kv_heads: int
) -> None:
    layout = layout_of(dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64)
    entries = [Entry(query_len=1, seq_len=900), Entry(query_len=130, seq_len=257), Entry(query_len=2, seq_len=65)]
    batch = cuda_batch(entries, layout, seed=1)
    assert relative_error(attend(backend, batch), reference(batch)) < TOLERANCE[dtype]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
def test_block_sizes(backend: TritonAttention, block_size: int) -> None:
    entries = [Entry(query_len=1, seq_len=777), Entry(query_len=77, seq_len=400)]
    batch = cuda_batch(entries, layout_of(torch.bfloat16, block_size=block_size), seed=2)
    assert relative_error(attend(backend, batch), reference(batch)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_chunk_over_a_long_context_is_split(backend: TritonAttention, dtype: torch.dtype) -> None:
    batch = cuda_batch([Entry(query_len=40, seq_len=9000)], layout_of(dtype), seed=3)
    plan = backend.plan(batch.inputs, batch.layout.block_size)
    result = backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=None)
    (launch,) = next(iter(plan.launches.values()))
    assert launch.work.items[1, 7].item() > 1
    assert relative_error(result, reference(batch)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (4, 4), (9, 3), (16, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefills_of_whole_tiles(
    backend: TritonAttention, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    layout = layout_of(dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    lens = [(1, 300), (2, 2), (129, 1129), (128, 128), (700, 737), (1, 1), (3500, 3601), (640, 1024), (33, 161)]
    batch = cuda_batch([Entry(query_len=n, seq_len=m) for n, m in lens], layout, seed=head_dim)
    plan = backend.plan(batch.inputs, block_size)
    with poisoned_memory():
        result = backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=None)
    if can_run_gluon(torch.device("cuda")):
        assert [launch.tile is WHOLE_TILE for launch in next(iter(plan.launches.values()))] == [False, True]
    assert relative_error(result, reference(batch)) < TOLERANCE[dtype]
    for _ in range(5):
        assert backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=None).equal(result)


def test_equal_steps_give_equal_bits(backend: TritonAttention) -> None:
    entries = [Entry(query_len=1, seq_len=n) for n in (9000, 3, 1200, 640, 5000)] + [Entry(query_len=300, seq_len=2000)]
    batch = cuda_batch(entries, LLAMA, seed=4)
    first = attend(backend, batch)
    for _ in range(50):
        assert attend(backend, batch).equal(first)


def test_layers_of_both_kinds_share_a_plan(backend: TritonAttention) -> None:
    batch = cuda_batch([Entry(query_len=1, seq_len=n) for n in (4000, 100)], LLAMA, seed=5)
    plan = backend.plan(batch.inputs, 16)
    expected = {window: reference(batch, window) for window in (None, 128)}
    for window in (None, 128) * 8:
        result = backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=window)
        assert relative_error(result, expected[window]) < TOLERANCE[torch.bfloat16]


def test_no_host_sync(backend: TritonAttention) -> None:
    entries = [Entry(query_len=1, seq_len=500), Entry(query_len=90, seq_len=90), Entry(query_len=1, seq_len=9)]
    batch = cuda_batch(entries, LLAMA, seed=6)
    attend(backend, batch)  # compiles
    with no_host_sync():
        plan = backend.plan(batch.inputs, 16)
        result = backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=None)
    assert relative_error(result, reference(batch)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [None, 300])
def test_captured_decode_is_right_for_other_lengths(backend: TritonAttention, window: int | None) -> None:
    """One graph, captured with short contexts, replayed with the lengths, tables and rows of other steps."""
    count = 5
    steps = [
        cuda_batch([Entry(query_len=1, seq_len=n) for n in lens], LLAMA, seed=seed)
        for seed, lens in enumerate([(1, 2, 3, 4, 5), (3000, 1, 17, 640, 900), (64, 8000, 64, 1, 2), (1, 1, 1, 1, 1)])
    ]
    widest = max(steps, key=lambda batch: batch.inputs.block_tables.shape[1])
    num_slots = max(batch.keys.shape[0] for batch in steps)
    static = cuda_batch([Entry(query_len=1, seq_len=1)] * count, LLAMA, seed=9)
    tables = torch.zeros_like(widest.inputs.block_tables)
    keys = torch.zeros((num_slots, 8, 128), device="cuda", dtype=torch.bfloat16)
    values = torch.zeros_like(keys)
    held = PagedBatch(
        inputs=replace(static.inputs, block_tables=tables),
        layout=LLAMA,
        q=static.q,
        keys=keys,
        values=values,
    )
    out = torch.empty((count, 32 * 128), device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        plan = backend.plan(held.inputs, 16)
        for _ in range(2):  # two layers: the second counts arrivals from zero again
            backend.attend(held.q, keys, values, plan, scale=held.scale, window=window, out=out)

    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for batch in [*steps, *steps]:
        held.q.copy_(batch.q)
        tables[:, : batch.inputs.block_tables.shape[1]].copy_(batch.inputs.block_tables)
        held.inputs.seq_lens.copy_(batch.inputs.seq_lens)
        held.inputs.rows.copy_(batch.inputs.rows)
        keys[: batch.keys.shape[0]].copy_(batch.keys)
        values[: batch.values.shape[0]].copy_(batch.values)
        out.fill_(float("nan"))
        graph.replay()
        assert out.equal(attend(backend, batch, window))
        assert relative_error(out, reference(batch, window)) < TOLERANCE[torch.bfloat16]


def test_c14_nan_stays_with_its_request(backend: TritonAttention) -> None:
    batch = cuda_batch([Entry(query_len=1, seq_len=n) for n in (40, 900, 300)], LLAMA, seed=10)
    healthy = attend(backend, batch)
    batch.values[batch.slots(1)[30]] = float("nan")
    ill = attend(backend, batch)
    assert ill[1].isnan().all()
    assert ill[0].equal(healthy[0])
    assert ill[2].equal(healthy[2])


def test_c47_a_query_sees_exactly_window_keys(backend: TritonAttention) -> None:
    window, seq_len = 100, 1000
    for query_len in (1, 60):
        batch = cuda_batch([Entry(query_len=query_len, seq_len=seq_len)], LLAMA, seed=11)
        last = attend(backend, batch, window)[-1].clone()
        slots = batch.slots(0)
        batch.values[slots[seq_len - 1 - window]] += 8
        assert attend(backend, batch, window)[-1].equal(last)
        batch.values[slots[seq_len - window]] += 8
        assert not attend(backend, batch, window)[-1].equal(last)


def test_cache_of_more_than_two_to_the_31_elements(backend: TritonAttention) -> None:
    layout = layout_of(torch.bfloat16, num_heads=32, num_kv_heads=8)
    num_slots = 2**31 // (8 * 128) + 4096
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_slots * 8 * 128:
        pytest.skip("needs 13 GB of free device memory")
    batch = cuda_batch([Entry(query_len=1, seq_len=200), Entry(query_len=50, seq_len=150)], layout, seed=12)
    shift = (num_slots - batch.keys.shape[0]) // 16 * 16
    large = torch.empty((2, num_slots, 8, 128), dtype=torch.bfloat16, device="cuda")
    for at, small in enumerate((batch.keys, batch.values)):
        large[at, shift : shift + small.shape[0]] = small
    expected = reference(batch)
    batch.inputs.block_tables.add_(shift // 16)
    plan = backend.plan(batch.inputs, 16)
    result = backend.attend(batch.q, large[0], large[1], plan, scale=batch.scale, window=None)
    assert relative_error(result, expected) < TOLERANCE[torch.bfloat16]
    qkv = torch.randn((1, 48, 128), device="cuda", dtype=torch.bfloat16)
    still = Rotation(cos=torch.ones(1, 1, 128, device="cuda"), sin=torch.zeros(1, 1, 128, device="cuda"))
    last = torch.tensor([num_slots - 1], device="cuda")
    rotate_and_write(qkv[None], None, 0.0, still, large[0], large[1], last)
    assert large[0, -1].equal(qkv[0, 32:40])
    assert large[1, -1].equal(qkv[0, 40:])


def test_work_lists_equal_the_reference() -> None:
    for seed in range(8):
        batch = cuda_batch(random_entries("mixed", seed, most=5000), LLAMA, seed=seed, padding=seed % 3)
        for tile_class in (
            TileClass(min_query=1, max_query=1, tile_tokens=1, tile_keys=64, spare_items=33, least_items=0),
            TileClass(min_query=2, max_query=2**31 - 1, tile_tokens=32, tile_keys=64, spare_items=0, least_items=33),
        ):
            num_tiles = tile_class.count_tiles(batch.inputs.host_query_lens)
            if num_tiles:
                work = build_work_list(batch.inputs, tile_class, most_tiles=num_tiles, num_kv_heads=8, window=None)
                expected = work_list_reference(batch.inputs, tile_class, window=None)
                assert work.items[1 : 1 + work.items[0, 0].item()].tolist() == expected
                assert not work.arrivals.any()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="programmatic dependent launch came with compute capability 9.0",
)
def test_dependent_launch_gives_the_same_bits() -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    plain = TritonAttention(num_multiprocessors=count, shared_memory_bytes=shared)
    dependent = TritonAttention(num_multiprocessors=count, shared_memory_bytes=shared, dependent_launch=True)
    batch = cuda_batch([Entry(query_len=1, seq_len=n) for n in (5000, 30, 700)], LLAMA, seed=13)
    expected = attend(plain, batch)
    plan = dependent.plan(batch.inputs, 16)
    for _ in range(8):
        batch.keys[0] = 0
        result = dependent.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=None)
        assert result.equal(expected)
