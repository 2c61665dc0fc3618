"""The torch attention backend against the formula, token by token, and against stale memory."""

import math

import pytest
import torch
from torch import Tensor

from gapless.layers.attention import TorchAttention
from gapless.layers.forward_inputs import ForwardInputs

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, MAX_BLOCKS = 6, 2, 16, 4, 40


def step_of(lens: list[tuple[int, int]]) -> ForwardInputs:
    """A step of entries (new tokens, context) on shuffled blocks; row ``i`` is the entry's, in reverse order."""
    count = len(lens)
    generator = torch.Generator().manual_seed(1)
    tables = torch.zeros(count + 1, MAX_BLOCKS, dtype=torch.int32)
    tables[:count] = (torch.randperm(count * MAX_BLOCKS, generator=generator) + 1).view(count, MAX_BLOCKS)
    rows = torch.arange(count - 1, -1, -1)
    positions = torch.cat([torch.arange(context - new, context) for new, context in lens])
    of_token = rows.repeat_interleave(torch.tensor([new for new, _ in lens]))
    starts = torch.tensor([0, *(new for new, _ in lens)]).cumsum(0)
    return ForwardInputs(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions,
        slot_mapping=tables[of_token, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=starts.int(),
        seq_lens=torch.tensor([context for _, context in lens], dtype=torch.int32),
        rows=rows.int(),
        block_tables=tables,
        logits_indices=starts[1:] - 1,
        host_query_lens=tuple(new for new, _ in lens),
        host_seq_lens=tuple(context for _, context in lens),
    )


def random_cache(inputs: ForwardInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    slots = (len(inputs.host_seq_lens) * MAX_BLOCKS + 1) * BLOCK_SIZE
    generator = torch.Generator().manual_seed(2)
    keys = torch.randn(slots, KV_HEADS, HEAD_DIM, generator=generator)
    values = torch.randn(slots, KV_HEADS, HEAD_DIM, generator=generator)
    return keys.to(dtype), values.to(dtype)


def queries(inputs: ForwardInputs, dtype: torch.dtype) -> Tensor:
    return torch.randn(len(inputs.positions), HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(3)).to(dtype)


def context_slots(inputs: ForwardInputs, entry: int) -> list[int]:
    table = inputs.block_tables[int(inputs.rows[entry])].tolist()
    return [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(inputs.host_seq_lens[entry])]


def by_formula(
    q: Tensor, keys: Tensor, values: Tensor, inputs: ForwardInputs, scale: float, window: int | None
) -> Tensor:
    rows = []
    for entry, new in enumerate(inputs.host_query_lens):
        slots = context_slots(inputs, entry)
        for token in range(new):
            end = len(slots) - new + token + 1
            seen = slots[max(0, end - window) if window else 0 : end]
            k = keys[seen].double().repeat_interleave(HEADS // KV_HEADS, 1)
            v = values[seen].double().repeat_interleave(HEADS // KV_HEADS, 1)
            query = q[int(inputs.query_starts[entry]) + token].double()
            weights = (torch.einsum("hd,khd->hk", query, k) * scale).softmax(-1)
            rows.append(torch.einsum("hk,khd->hd", weights, v).flatten())
    return torch.stack(rows)


STEPS = {
    "decodes of all lengths": [(1, n) for n in (1, 2, 150, 3, 4, 64, 65, 149, 30, 5)],
    "whole prompts": [(5, 5), (2, 2), (9, 9)],
    "chunks of every kind": [(3, 7), (1, 8), (4, 4), (6, 150), (1, 1), (2, 3)],
    "one token": [(1, 1)],
}


@pytest.mark.parametrize("window", [None, 1, 3, 4, 100, 1000])
@pytest.mark.parametrize("lens", STEPS.values(), ids=STEPS.keys())
def test_equals_the_formula(lens: list[tuple[int, int]], window: int | None) -> None:
    inputs = step_of(lens)
    keys, values = random_cache(inputs, torch.float32)
    q = queries(inputs, torch.float32)
    backend = TorchAttention()
    plan = backend.plan(inputs, BLOCK_SIZE)
    scale = 1.7 / math.sqrt(HEAD_DIM)
    got = backend.attend(q, keys, values, plan, scale=scale, window=window)
    assert got.shape == (len(inputs.positions), HEADS * HEAD_DIM)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), by_formula(q, keys, values, inputs, scale, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_types(dtype: torch.dtype, bound: float) -> None:
    inputs = step_of(STEPS["chunks of every kind"])
    keys, values = random_cache(inputs, dtype)
    q = queries(inputs, dtype)
    backend = TorchAttention()
    got = backend.attend(q, keys, values, backend.plan(inputs, BLOCK_SIZE), scale=0.25, window=5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_formula(q, keys, values, inputs, 0.25, 5), atol=bound, rtol=bound)


def test_one_plan_serves_layers_with_different_windows() -> None:
    inputs = step_of(STEPS["chunks of every kind"])
    keys, values = random_cache(inputs, torch.float32)
    q = queries(inputs, torch.float32)
    backend = TorchAttention()
    plan = backend.plan(inputs, BLOCK_SIZE)
    for window in (None, 2, None, 2, 6):
        got = backend.attend(q, keys, values, plan, scale=0.25, window=window)
        want = by_formula(q, keys, values, inputs, 0.25, window)
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_queries_may_be_a_strided_view() -> None:
    inputs = step_of(STEPS["chunks of every kind"])
    keys, values = random_cache(inputs, torch.float32)
    q = queries(inputs, torch.float32)
    wider = torch.randn(q.shape[0], HEADS + 2 * KV_HEADS, HEAD_DIM)
    wider[:, :HEADS] = q
    backend = TorchAttention()
    plan = backend.plan(inputs, BLOCK_SIZE)
    strided = backend.attend(wider[:, :HEADS], keys, values, plan, scale=0.25, window=None)
    assert torch.equal(strided, backend.attend(q, keys, values, plan, scale=0.25, window=None))


@pytest.mark.parametrize("window", [None, 3])
def test_c14_nan_outside_the_context_is_never_seen(window: int | None) -> None:
    inputs = step_of(STEPS["decodes of all lengths"] + STEPS["chunks of every kind"])
    clean_keys, clean_values = random_cache(inputs, torch.float32)
    owned = torch.zeros(clean_keys.shape[0], dtype=torch.bool)
    for entry in range(len(inputs.host_seq_lens)):
        owned[context_slots(inputs, entry)] = True
    # Stale slots of partly filled blocks and the whole reserved block hold another request's NaN.
    keys, values = clean_keys.clone(), clean_values.clone()
    keys[~owned] = math.nan
    values[~owned] = math.nan
    q = queries(inputs, torch.float32)
    backend = TorchAttention()
    plan = backend.plan(inputs, BLOCK_SIZE)
    got = backend.attend(q, keys, values, plan, scale=0.25, window=window)
    assert torch.equal(got, backend.attend(q, clean_keys, clean_values, plan, scale=0.25, window=window))
    assert got.isfinite().all()


def test_c14_one_entry_of_nan_leaves_its_group_alone() -> None:
    inputs = step_of([(1, 20), (1, 18), (1, 16)])
    keys, values = random_cache(inputs, torch.float32)
    q = queries(inputs, torch.float32)
    backend = TorchAttention()
    plan = backend.plan(inputs, BLOCK_SIZE)
    clean = backend.attend(q, keys, values, plan, scale=0.25, window=None)
    sick = context_slots(inputs, 1)
    keys[sick], values[sick], q[1] = math.nan, math.nan, math.nan
    got = backend.attend(q, keys, values, plan, scale=0.25, window=None)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
