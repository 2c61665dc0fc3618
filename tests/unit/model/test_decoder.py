"""The forward pass beyond agreement with transformers: order of writes, stale memory, dtypes, repeatability."""

import math
from dataclasses import replace

import pytest
import torch

from fixtures.checkpoints import f_hist_model, f_table_model
from fixtures.paged_driver import PagedDriver, model_of

PROMPT = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3)).tolist()
SIZE = 320


def table_of(**steps: int) -> torch.Tensor:
    """Logits of -30, but 20 for ``then`` after each token named ``t<id>``."""
    table = torch.full((SIZE, SIZE), -30.0)
    for name, then in steps.items():
        table[int(name[1:]), then] = 20.0
    return table


def test_f_table_gives_back_its_table() -> None:
    table = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    driver = PagedDriver(model_of(f_table_model(table)))
    torch.testing.assert_close(driver.prefill(0, [5, 9, 311]), table[311], atol=1e-5, rtol=0)
    driver.tokens[0].append(7)
    torch.testing.assert_close(driver.step([(0, 1)])[0], table[7], atol=1e-5, rtol=0)


def test_c51_fp16_overflow() -> None:
    reference = f_table_model(table_of(t4=9, t9=4), embedding_scale=2000.0)
    driver = PagedDriver(model_of(reference, dtype=torch.float16))
    logits = driver.prefill(0, [4, 9, 4])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert int(logits.argmax()) == 9
    assert float(logits.max()) == pytest.approx(20.0, abs=0.05)
    assert driver.greedy(0, [4], 5) == [9, 4, 9, 4, 9]


def test_c14_a_nan_request_leaves_its_neighbours_and_its_blocks_clean() -> None:
    sick = 11
    driver = PagedDriver(model_of(f_table_model(table_of(t4=9, t9=4), nan_tokens=[sick])), num_rows=3)
    solo = driver.prefill(0, [4, 9, 4])
    for row, prompt in enumerate(([4, 9, 4], [4, 9, sick], [9, 4])):
        driver.tokens[row], driver.computed[row] = list(prompt), 0
    logits = driver.step([(0, 3), (1, 3), (2, 2)])
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[0], solo, atol=1e-5, rtol=0)
    assert int(logits[2].argmax()) == 9
    for row, token in enumerate((9, sick, 9)):
        driver.tokens[row].append(token)
    logits = driver.step([(0, 1), (1, 1), (2, 1)])
    assert [int(row.argmax()) for row in logits[[0, 2]]] == [4, 4]
    assert logits[1].isnan().all()
    # The same blocks again: NaN lies behind the new context in the block it shares.
    assert driver.kv.values[0][driver.slot(1, 3)].isnan().all()
    clean = driver.prefill(1, [4, 9])
    assert int(clean.argmax()) == 4
    assert clean.isfinite().all()


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_c14_stale_nan_everywhere_else(arch: str) -> None:
    options = {"sliding_window": 4} if arch == "mistral" else {}
    model = model_of(f_hist_model(arch, **options))  # type: ignore[arg-type]
    want = PagedDriver(model).greedy(0, PROMPT, 8, chunk=5)
    driver = PagedDriver(model)
    for tensor in (*driver.kv.keys, *driver.kv.values):
        tensor.fill_(math.nan)
    assert driver.greedy(0, PROMPT, 8, chunk=5) == want


def test_c14_a_nan_in_the_reserved_block_reaches_nobody() -> None:
    """Padding entries run token 0, which may be the sick one."""
    table = table_of(t4=9, t9=4)
    driver = PagedDriver(model_of(f_table_model(table, nan_tokens=[0])), num_rows=2)
    for row, prompt in enumerate(([4, 9, 4, 9, 4, 9], [4])):
        driver.tokens[row] = list(prompt)
    assert [int(row.argmax()) for row in driver.step([(0, 6), (1, 1)], padding=3)] == [4, 9]
    driver.tokens[0].append(4)
    driver.tokens[1].append(9)
    assert [int(row.argmax()) for row in driver.step([(0, 1), (1, 1)], padding=2)] == [9, 4]


def test_prefix_hit_within_the_step() -> None:
    """One entry fills blocks that another entry of the same step reads as its cached prefix."""
    driver = PagedDriver(model_of(f_hist_model()), num_rows=2)
    want = driver.prefill(0, PROMPT)
    for tensor in (*driver.kv.keys, *driver.kv.values):
        tensor.zero_()
    driver.tables[0, :4] = driver.tables[1, :4]
    driver.tokens = [list(PROMPT), list(PROMPT[:20])]
    driver.computed = [16, 0]
    # The reader stands before the writer.
    logits = driver.step([(0, 8), (1, 20)])
    torch.testing.assert_close(logits[0], want, atol=1e-4, rtol=0)


def test_the_same_step_gives_the_same_bits() -> None:
    model = model_of(f_hist_model("qwen3"), dtype=torch.bfloat16)
    runs = []
    for _ in range(2):
        driver = PagedDriver(model, num_rows=2)
        driver.tokens = [list(PROMPT), list(PROMPT[:7])]
        driver.step([(0, 23), (1, 6)])
        runs.append(driver.step([(0, 1), (1, 1)]))
    assert torch.equal(runs[0], runs[1])


def test_a_step_that_samples_nothing_still_writes_its_keys() -> None:
    """The first chunk of a long prompt alone."""
    model = model_of(f_hist_model())
    want = PagedDriver(model).prefill(0, PROMPT, chunk=16)
    driver = PagedDriver(model)
    driver.tokens = [list(PROMPT)]
    inputs = replace(driver.inputs([(0, 16)]), logits_indices=torch.zeros(0, dtype=torch.int64))
    with torch.inference_mode():
        logits = driver.runner.forward(inputs)
    assert (logits.shape, logits.dtype) == ((0, 128), torch.float32)
    assert torch.equal(driver.step([(0, 8)])[0], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_stay_near_fp32(dtype: torch.dtype) -> None:
    reference = f_hist_model("qwen3")
    exact = PagedDriver(model_of(reference)).prefill(0, PROMPT, chunk=5)
    got = PagedDriver(model_of(reference, dtype=dtype)).prefill(0, PROMPT, chunk=5)
    assert got.dtype == torch.float32
    assert float((got - exact).abs().max()) < (0.5 if dtype == torch.bfloat16 else 0.1)
