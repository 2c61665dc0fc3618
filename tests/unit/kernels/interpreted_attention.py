"""Paged attention in Triton's interpreter, fp32, against the plain torch reference (see test_kernels_interpreted)."""

from collections.abc import Iterator

import pytest
import torch

from gapless.kernels.attention_tiles import TileShape
from gapless.kernels.paged_attention import TritonAttention, paged_attention_reference
from gapless.layers.forward_inputs import StepBounds
from unit.kernels.paged_batches import (
    Entry,
    Layout,
    PagedBatch,
    make_batch,
    random_entries,
    relative_error,
    with_bounds,
    with_inputs,
)

TOLERANCE = 1e-6
SMALL = Layout(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16)
# Seven multiprocessors and small tiles make even short contexts split into several items.
TILE = TileShape(rows=16, keys=16, num_warps=4, num_stages=2)
SPLITTING = TritonAttention(num_multiprocessors=7, decode_tile=TILE, prefill_tile=TILE)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN or the largest integer, so reading one before writing it shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def attend(batch: PagedBatch, window: int | None = None, backend: TritonAttention = SPLITTING) -> torch.Tensor:
    plan = backend.plan(batch.inputs, batch.layout.block_size)
    return backend.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=window)


def error(batch: PagedBatch, window: int | None = None, backend: TritonAttention = SPLITTING) -> float:
    expected = paged_attention_reference(
        batch.q, batch.keys, batch.values, batch.inputs, batch.layout.block_size, scale=batch.scale, window=window
    )
    return relative_error(attend(batch, window, backend), expected)


def test_poison_reaches_uninitialised_tensors() -> None:
    assert torch.empty(3).isnan().all()


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 1, 17])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_ragged_batches(kind: str, window: int | None, seed: int) -> None:
    batch = make_batch(random_entries(kind, seed, most=120), SMALL, seed=seed)
    assert error(batch, window) < TOLERANCE


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(2, 2), (5, 1), (6, 2), (20, 1)])
def test_any_number_of_query_heads_for_a_kv_head(num_heads: int, num_kv_heads: int) -> None:
    layout = Layout(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64, block_size=4)
    entries = [Entry(query_len=1, seq_len=50), Entry(query_len=9, seq_len=21), Entry(query_len=1, seq_len=1)]
    assert error(make_batch(entries, layout, seed=3)) < TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_sizes_with_the_default_tiles(head_dim: int) -> None:
    layout = Layout(num_heads=2, num_kv_heads=1, head_dim=head_dim, block_size=16)
    entries = [Entry(query_len=1, seq_len=150), Entry(query_len=12, seq_len=40)]
    backend = TritonAttention(num_multiprocessors=4)
    assert error(make_batch(entries, layout, seed=4), backend=backend) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [None, 20])
def test_block_sizes(block_size: int, window: int | None) -> None:
    layout = Layout(num_heads=2, num_kv_heads=2, head_dim=64, block_size=block_size)
    entries = [Entry(query_len=1, seq_len=70), Entry(query_len=5, seq_len=33), Entry(query_len=1, seq_len=64)]
    assert error(make_batch(entries, layout, seed=5), window) < TOLERANCE


def test_tiles_of_many_tokens_mask_only_their_last_keys() -> None:
    tile = TileShape(rows=64, keys=16, num_warps=4, num_stages=2)
    backend = TritonAttention(num_multiprocessors=3, prefill_tile=tile)
    entries = [Entry(query_len=70, seq_len=110), Entry(query_len=33, seq_len=33)]
    batch = make_batch(entries, SMALL, seed=6)
    assert error(batch, backend=backend) < TOLERANCE
    assert error(batch, 10, backend) < TOLERANCE


def test_padding_entries_change_nothing_for_the_others() -> None:
    entries = [Entry(query_len=1, seq_len=60), Entry(query_len=1, seq_len=7)]
    batch = make_batch(entries, SMALL, seed=7, padding=3)
    assert error(batch) < TOLERANCE
    alone = make_batch(entries, SMALL, seed=7)
    torch.testing.assert_close(attend(batch)[:2], attend(with_q(alone, batch.q[:2])), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bounds_in_place_of_lengths_change_no_bit(kind: str, window: int | None, seed: int) -> None:
    batch = make_batch(random_entries(kind, seed, most=120), SMALL, seed=seed)
    num_tokens = len(batch.q)
    padded = with_bounds(
        batch, num_tokens=num_tokens + 5, num_entries=9, bounds=StepBounds(decodes=6 + seed, prefills=6)
    )
    plan = SPLITTING.plan(padded.inputs, batch.layout.block_size)
    expected = attend(batch, window)
    for _ in range(2):  # two layers
        result = SPLITTING.attend(padded.q, batch.keys, batch.values, plan, scale=batch.scale, window=window)
        assert result[:num_tokens].equal(expected)
        assert not result[num_tokens:].any(), "what no entry owns is neither attended from nor left as it was"


def test_layers_share_a_plan_and_equal_steps_give_equal_bits() -> None:
    entries = [Entry(query_len=1, seq_len=100), Entry(query_len=30, seq_len=90)]
    batch = make_batch(entries, SMALL, seed=8)
    plan = SPLITTING.plan(batch.inputs, batch.layout.block_size)

    def layer(window: int | None) -> torch.Tensor:
        return SPLITTING.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=window)

    first = [layer(None), layer(20), layer(None), layer(20)]
    assert first[0].equal(first[2])
    assert first[1].equal(first[3])
    assert not first[0].equal(first[1])
    assert attend(batch).equal(first[0])
    assert len(plan.launches) == 2
    for launch in (launch for launches in plan.launches.values() for launch in launches):
        assert not launch.work.arrivals.any()


@pytest.mark.parametrize("query_len", [1, 4])
def test_c47_a_query_sees_exactly_window_keys(query_len: int) -> None:
    window, seq_len = 20, 57
    batch = make_batch([Entry(query_len=query_len, seq_len=seq_len)], SMALL, seed=9)
    last = attend(batch, window)[-1]

    def last_with_other(position: int) -> torch.Tensor:
        values = batch.values.clone()
        values[batch.slots(0)[position]] += 1
        return attend(with_values(batch, values), window)[-1]

    assert last_with_other(seq_len - 1 - window).equal(last)
    assert not last_with_other(seq_len - window).equal(last)


@pytest.mark.parametrize("query_len", [1, 4])
def test_what_lies_before_the_window_is_never_read(query_len: int) -> None:
    """Its blocks may belong to another request by then, which may have written NaN."""
    window, seq_len = 20, 75
    batch = make_batch([Entry(query_len=query_len, seq_len=seq_len)], SMALL, seed=13)
    expected = attend(batch, window)
    gone = batch.slots(0)[: seq_len - query_len + 1 - window]
    batch.keys[gone] = float("nan")
    batch.values[gone] = float("nan")
    assert attend(batch, window).equal(expected)


def test_chunks_give_what_the_whole_prompt_gives() -> None:
    whole = make_batch([Entry(query_len=45, seq_len=45)], SMALL, seed=10)
    expected = attend(whole)
    for begin, end in ((0, 1), (1, 18), (18, 45)):
        chunk = with_q(
            with_inputs(
                whole,
                query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                host_query_lens=(end - begin,),
                host_seq_lens=(end,),
            ),
            whole.q[begin:end],
        )
        torch.testing.assert_close(attend(chunk), expected[begin:end], rtol=1e-5, atol=1e-6)


def test_c14_nan_stays_with_its_request() -> None:
    entries = [Entry(query_len=1, seq_len=40), Entry(query_len=1, seq_len=90), Entry(query_len=8, seq_len=20)]
    batch = make_batch(entries, SMALL, seed=11)
    healthy = attend(batch)
    values = batch.values.clone()
    values[batch.slots(1)[30]] = float("nan")
    ill = attend(with_values(batch, values))
    assert ill[1].isnan().all()
    assert ill[0].equal(healthy[0])
    assert ill[2:].equal(healthy[2:])


def test_launch_depends_on_counts_only() -> None:
    """A captured launch is replayed with other lengths, so its sizes must not come from them."""
    short = make_batch([Entry(query_len=1, seq_len=3)] * 3, SMALL, seed=12)
    long = make_batch([Entry(query_len=1, seq_len=n) for n in (200, 1, 90)], SMALL, seed=12)
    slots = []
    for batch in (short, long):
        plan = SPLITTING.plan(batch.inputs, batch.layout.block_size)
        SPLITTING.attend(batch.q, batch.keys, batch.values, plan, scale=batch.scale, window=None)
        slots.append([launch.work.num_slots for launches in plan.launches.values() for launch in launches])
    assert slots[0] == slots[1]
    # The tables, lengths and rows of another batch in the same launch: what a replay does.
    replayed = with_inputs(long, host_seq_lens=short.inputs.host_seq_lens)
    assert attend(replayed).equal(attend(long))


def with_q(batch: PagedBatch, q: torch.Tensor) -> PagedBatch:
    return PagedBatch(inputs=batch.inputs, layout=batch.layout, q=q, keys=batch.keys, values=batch.values)


def with_values(batch: PagedBatch, values: torch.Tensor) -> PagedBatch:
    return PagedBatch(inputs=batch.inputs, layout=batch.layout, q=batch.q, keys=batch.keys, values=values)
