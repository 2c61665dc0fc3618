"""Llama 2 and 3, SmolLM2, TinyLlama and everything else saved as ``LlamaForCausalLM``.

Reference: Touvron et al., arXiv:2307.09288; Grattafiori et al., arXiv:2407.21783.
"""

from typing import TYPE_CHECKING

from gapless.model.families.family import Family, FamilyTraits, full_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["LLAMA"]


def _traits(config: "PretrainedConfig") -> FamilyTraits:
    bias = bool(getattr(config, "attention_bias", False))
    return FamilyTraits(
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        windows=full_attention(config),
    )


LLAMA = Family(architecture="LlamaForCausalLM", model_type="llama", traits=_traits)
