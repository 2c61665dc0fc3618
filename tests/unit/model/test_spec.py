"""What a config may ask for, and that the rest is refused by name."""

from typing import Any

import pytest
import torch
import transformers

from fixtures.checkpoints import f_hist_config
from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.families import FAMILIES
from gapless.model.spec import kv_shape, spec_from_config


def test_a_spec_holds_what_the_config_says() -> None:
    spec = spec_from_config(f_hist_config("qwen2", tie_word_embeddings=True, rms_norm_eps=1e-4))
    assert (spec.architecture, spec.hidden_size, spec.num_layers) == ("Qwen2ForCausalLM", 64, 2)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (True, False, False, False)
    assert (spec.tied, spec.norm_eps, spec.vocab_size) == (True, 1e-4, 128)
    assert kv_shape(spec, torch.bfloat16).bytes_per_token == 2 * 2 * 2 * 32 * 2


def test_a_config_without_architectures_goes_by_model_type() -> None:
    for family in FAMILIES.values():
        config = f_hist_config(family.model_type)  # type: ignore[arg-type]
        config.architectures = None
        assert spec_from_config(config).architecture == family.architecture


def test_absent_head_dim_and_kv_heads_follow_from_the_heads() -> None:
    spec = spec_from_config(f_hist_config(head_dim=None, num_key_value_heads=None))
    assert (spec.head_dim, spec.num_kv_heads) == (16, 4)


@pytest.mark.parametrize(
    "config",
    [transformers.PhiConfig(), transformers.StableLmConfig(), transformers.Gemma2Config(), transformers.GPT2Config()],
    ids=["phi", "stablelm", "gemma2", "gpt2"],
)
def test_c46_other_architectures_are_refused_by_name(config: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=config.model_type):
        spec_from_config(config)
    config.architectures = ["OtherForCausalLM"]
    with pytest.raises(UnsupportedModelError, match=r"'OtherForCausalLM'.*LlamaForCausalLM"):
        spec_from_config(config)
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(UnsupportedModelError, match=config.model_type):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("arch", "name", "value", "message"),
    [
        ("llama", "hidden_act", "gelu", "hidden_act='gelu'"),
        ("llama", "quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("mistral", "attention_bias", True, "attention_bias=True"),
        ("qwen2", "mlp_bias", True, "mlp_bias=True"),
        ("qwen3", "mlp_bias", True, "mlp_bias=True"),
        ("llama", "head_dim", 15, "head_dim=15"),
    ],
)
def test_settings_gapless_does_not_have_are_refused_by_name(arch: Any, name: str, value: Any, message: str) -> None:
    config = f_hist_config(arch)
    object.__setattr__(config, name, value)
    with pytest.raises(UnsupportedModelError, match=message):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_key_value_heads", 3), ("vocab_size", 0), ("intermediate_size", -1), ("num_hidden_layers", "2")],
)
def test_numbers_that_contradict_each_other_are_refused(name: str, value: Any) -> None:
    config = f_hist_config()
    object.__setattr__(config, name, value)
    with pytest.raises(CheckpointError, match=name):
        spec_from_config(config)
