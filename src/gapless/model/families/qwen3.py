"""Qwen3: RMSNorm over each head of q and k before RoPE, biases only with ``attention_bias``, windows as in Qwen2.

Reference: Yang et al., arXiv:2505.09388.
"""

from typing import TYPE_CHECKING

from gapless.model.families.family import Family, FamilyTraits, refuse_options, windows_by_layer_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["QWEN3"]


def _traits(config: "PretrainedConfig") -> FamilyTraits:
    refuse_options(config, "mlp_bias")
    bias = bool(getattr(config, "attention_bias", False))
    return FamilyTraits(qkv_bias=bias, o_bias=bias, qk_norm=True, windows=windows_by_layer_type(config))


QWEN3 = Family(architecture="Qwen3ForCausalLM", model_type="qwen3", traits=_traits)
