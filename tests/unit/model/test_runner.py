"""The runner's checks, idle steps, and on a GPU: no host sync, and the measured peak."""

from typing import Any

import pytest
import torch

from fixtures.checkpoints import f_hist_model
from fixtures.paged_driver import PagedDriver, model_of
from gapless.kernels.paged_attention import TritonAttention
from gapless.layers.attention import AttentionBackend, TorchAttention
from gapless.model.kv_cache import KVCache
from gapless.model.runner import ModelRunner, idle_inputs, measure_activation_peak
from gapless.model.spec import kv_shape

PROMPT = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def backend_named(name: str) -> AttentionBackend[Any]:
    if name == "torch":
        return TorchAttention()
    return TritonAttention(num_multiprocessors=torch.cuda.get_device_properties(0).multi_processor_count)


def test_a_cache_made_for_another_model_is_noticed() -> None:
    model = model_of(f_hist_model())
    shape = kv_shape(model.spec, torch.bfloat16)
    with pytest.raises(AssertionError, match="another model"):
        ModelRunner(model, KVCache(shape, num_blocks=1, block_size=4, device=model.device))


def test_an_idle_step_touches_the_reserved_block_only() -> None:
    driver = PagedDriver(model_of(f_hist_model()), num_rows=3)
    inputs = idle_inputs((5, 1, 9), max_rows=3, block_size=driver.block_size, device=torch.device("cpu"))
    with torch.inference_mode():
        logits = driver.runner.forward(inputs)
    assert logits.shape == (3, 128)
    assert logits.isfinite().all()
    for tensor in (*driver.kv.keys, *driver.kv.values):
        assert tensor[: driver.block_size].abs().sum() > 0
        assert tensor[driver.block_size :].abs().sum() == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_on_a_gpu_without_host_syncs(arch: str, backend: str) -> None:
    options = {"sliding_window": 6} if arch == "mistral" else {}
    reference = f_hist_model(arch, **options)  # type: ignore[arg-type]
    want = PagedDriver(model_of(reference)).greedy(0, PROMPT, 24, chunk=7)
    model = model_of(reference, device="cuda", attention=backend_named(backend))
    driver = PagedDriver(model, num_rows=2, block_size=16)
    # Compile and allocate once before syncs are forbidden.
    driver.greedy(0, PROMPT, 2, chunk=7)
    driver.tokens = [list(PROMPT), list(PROMPT)]
    driver.computed = [0, 0]
    out: list[list[int]] = [[], []]
    for counts in [(7, 24), (7, 1), (7, 1), (3, 1)] + [(1, 1)] * 23:
        inputs = driver.inputs(list(enumerate(counts)))
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.inference_mode():
                logits = driver.runner.forward(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for row in (0, 1):
            if driver.computed[row] == len(driver.tokens[row]):
                out[row].append(int(logits[row].argmax()))
                driver.tokens[row].append(out[row][-1])
    assert out[0] == want
    assert out[1][:24] == want


@pytest.mark.gpu
def test_the_activation_peak_covers_the_largest_step() -> None:
    model = model_of(f_hist_model(), device="cuda", dtype=torch.bfloat16, attention=backend_named("triton"))
    peak = measure_activation_peak(model, token_budget=64, max_rows=8, block_size=16)
    assert measure_activation_peak(model, token_budget=4096, max_rows=8, block_size=16) > peak
    assert peak >= 64 * 2 * 96 * 2 + 8 * 128 * 4
