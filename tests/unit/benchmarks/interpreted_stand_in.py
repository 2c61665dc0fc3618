"""The stand-in for flash-attn in Triton's interpreter, against plain torch (run by ``test_flash_attn_stand_in``)."""

import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "peers" / "stand_in"))

import flash_attn

HEADS, KV_HEADS, HEAD_DIM, PAGE = 6, 2, 32, 16
SCALE = 0.3


@pytest.fixture(autouse=True)
def _one_set_of_caches_a_process() -> Iterator[None]:
    yield
    flash_attn._steps.clear()


class Batch:
    """Entries with contexts of these lengths (-1: padding) over pages in random order, in ``layers`` caches."""

    def __init__(self, lengths: list[int], layers: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        pages = [0 if length < 0 else length // PAGE + 1 for length in lengths]
        order = torch.randperm(sum(pages) + 2, generator=draw).tolist()
        self.table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
        for entry, count in enumerate(pages):
            self.table[entry, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)

        def numbers(*size: int) -> Tensor:
            return torch.randn(size, generator=draw)

        size = (sum(pages) + 2, PAGE, KV_HEADS, HEAD_DIM)
        self.caches = [(numbers(*size), numbers(*size)) for _ in range(layers)]
        self.q = numbers(len(lengths), 1, HEADS, HEAD_DIM)
        self.k = numbers(len(lengths), 1, KV_HEADS, HEAD_DIM)
        self.v = numbers(len(lengths), 1, KV_HEADS, HEAD_DIM)

    def attend(self, layer: int, window: tuple[int, int] = (-1, -1)) -> Tensor:
        keys, values = self.caches[layer]
        return flash_attn.flash_attn_with_kvcache(
            self.q,
            keys,
            values,
            self.k,
            self.v,
            cache_seqlens=torch.tensor(self.lengths, dtype=torch.int32),
            block_table=self.table,
            softmax_scale=SCALE,
            causal=True,
            window_size=window,
        )

    def expected(self, layer: int, entry: int, window: int | None = None) -> Tensor:
        """Attention of one entry whose new key and value come last."""
        length = self.lengths[entry]
        at = torch.arange(length)
        slots = self.table[entry].long()[at // PAGE] * PAGE + at % PAGE
        keys, values = (
            torch.cat([cache.view(-1, KV_HEADS, HEAD_DIM)[slots], new[entry]])
            for cache, new in zip(self.caches[layer], (self.k, self.v), strict=True)
        )
        if window is not None:
            keys, values = keys[-window:], values[-window:]
        group = HEADS // KV_HEADS
        scores = torch.einsum("hd,khd->hk", self.q[entry, 0], keys.repeat_interleave(group, 1)) * SCALE
        return torch.einsum("hk,khd->hd", scores.softmax(-1), values.repeat_interleave(group, 1))


def check(batch: Batch, layer: int) -> None:
    expected = {entry: batch.expected(layer, entry) for entry, n in enumerate(batch.lengths) if n >= 0}
    found = batch.attend(layer)
    for entry, wanted in expected.items():
        torch.testing.assert_close(found[entry, 0], wanted, rtol=1e-5, atol=1e-5)


def test_transformers_finds_it_by_the_usual_look_ups() -> None:
    assert version("flash-attn") == flash_attn.__version__
    assert packages_distributions()["flash_attn"] == ["flash-attn"]


def test_steps_of_ragged_contexts_with_padding() -> None:
    batch = Batch([70, 0, 16, 15, -1, -1], layers=2, seed=0)
    before = [tuple(cache.clone() for cache in layer) for layer in batch.caches]
    for layer in range(2):
        check(batch, layer)
    # The new tokens, and nothing else, were written; those of padding went nowhere.
    for layer, (keys, values) in enumerate(batch.caches):
        for cache, old, new in ((keys, before[layer][0], batch.k), (values, before[layer][1], batch.v)):
            flat, wanted = cache.view(-1, KV_HEADS, HEAD_DIM), old.view(-1, KV_HEADS, HEAD_DIM).clone()
            for entry, length in enumerate(batch.lengths):
                if length >= 0:
                    slot = int(batch.table[entry, length // PAGE]) * PAGE + length % PAGE
                    wanted[slot] = new[entry, 0]
            assert flat.equal(wanted)


def test_each_step_and_batch_size_makes_its_own_plan() -> None:
    first = Batch([33, 5, 48], layers=2, seed=1)
    for _ in range(3):
        for layer in range(2):
            check(first, layer)
        first.lengths = [length + 1 for length in first.lengths]
    # One entry fewer on the same caches, as when a request has ended.
    first.lengths, first.table = first.lengths[:2], first.table[:2]
    first.q, first.k, first.v = first.q[:2], first.k[:2], first.v[:2]
    for layer in range(2):
        check(first, layer)


def test_layers_of_a_step_share_a_plan() -> None:
    batch = Batch([20, 40], layers=3, seed=2)
    plans = []
    for layer in range(3):
        batch.attend(layer)
        plans.append(flash_attn._steps[batch.q.device].plan)
    assert plans[0] is plans[1] is plans[2]
    batch.attend(0)
    assert flash_attn._steps[batch.q.device].plan is not plans[0]


def test_a_window_counts_the_keys_to_the_left() -> None:
    batch = Batch([60, 3], layers=1, seed=3)
    expected = [batch.expected(0, entry, window=11) for entry in range(2)]
    found = batch.attend(0, window=(10, 0))
    for entry in range(2):
        torch.testing.assert_close(found[entry, 0], expected[entry], rtol=1e-5, atol=1e-5)
