"""Each family with each RoPE type answers what transformers answers, through paged memory and in chunks."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fixtures.checkpoints import Arch, f_hist_model
from fixtures.paged_driver import PagedDriver, model_of

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
}
ARCHS: tuple[Arch, ...] = ("llama", "mistral", "qwen2", "qwen3")
PROMPT = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3)).tolist()


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def reference_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, attention_mask=torch.ones(1, len(prompt)))
    ids: list[int] = out[0, len(prompt) :].tolist()
    return ids


def check_against(reference: PreTrainedModel, *, prompt: list[int] = PROMPT, chunk: int = 7) -> None:
    """Logits to 1e-4 after the prompt, whole and in chunks, and 24 equal greedy ids."""
    driver = PagedDriver(model_of(reference))
    want = reference_logits(reference, prompt)[-1]
    torch.testing.assert_close(driver.prefill(0, prompt), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(driver.prefill(0, prompt, chunk=chunk), want, atol=1e-4, rtol=0)
    assert driver.greedy(0, prompt, 24, chunk=chunk) == reference_greedy(reference, prompt, 24)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_each_rope_type_equals_transformers(arch: Arch, rope: str) -> None:
    check_against(f_hist_model(arch, rope_parameters=dict(ROPES[rope])))


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen2", {"rms_norm_eps": 0.5}),
    ],
)
def test_options_equal_transformers(arch: Arch, options: dict[str, Any]) -> None:
    check_against(f_hist_model(arch, **options))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [16, 32, None])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_c48_head_dim_kv_heads_and_qk_norm(arch: Arch, head_dim: int | None, kv_heads: int) -> None:
    options: dict[str, Any] = {"num_key_value_heads": kv_heads}
    if not (arch == "qwen3" and head_dim is None):  # Qwen3's config insists on a number.
        options["head_dim"] = head_dim
    check_against(f_hist_model(arch, **options))


def test_c48_qk_norm_comes_before_rope_and_is_not_skipped() -> None:
    reference = f_hist_model("qwen3")
    assert reference.model.layers[0].self_attn.q_proj.weight.shape == (128, 64)
    model = model_of(reference)
    right = PagedDriver(model).prefill(0, PROMPT)
    for layer in model.layers:
        assert layer.qk_norm is not None
        layer.qk_norm.fill_(1.0)
    assert (PagedDriver(model).prefill(0, PROMPT) - right).abs().max() > 0.1


@pytest.mark.parametrize("arch", ARCHS)
def test_many_requests_in_mixed_steps_equal_solo(arch: Arch) -> None:
    """Decodes, chunks and whole prompts in one step, rows in any order, with padding entries behind them."""
    reference = f_hist_model(arch)
    driver = PagedDriver(model_of(reference), num_rows=4)
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, 128, (n,), generator=generator).tolist() for n in (9, 1, 16, 5)]
    for row, prompt in enumerate(prompts):
        driver.tokens[row] = list(prompt)
    plan = [[(2, 7), (0, 9)], [(0, 1), (2, 8), (1, 1)], [(1, 1), (3, 5), (2, 1), (0, 1)]]
    plan += [[(3, 1), (2, 1), (0, 1), (1, 1)]] * 12
    out: list[list[int]] = [[] for _ in prompts]
    for padding, entries in enumerate(plan):
        logits = driver.step(entries, padding=padding % 3)
        for (row, _), answer in zip(entries, logits, strict=True):
            if driver.computed[row] == len(driver.tokens[row]):
                out[row].append(int(answer.argmax()))
                driver.tokens[row].append(out[row][-1])
    for prompt, ids in zip(prompts, out, strict=True):
        assert len(ids) >= 13
        assert ids == reference_greedy(reference, prompt, len(ids))
