"""Qwen2 and Qwen2.5: biases on q, k and v only, and a sliding window in the layers that ``layer_types`` names.

``use_sliding_window=false`` turns the window off; ``max_window_layers`` is how configs of before ``layer_types`` chose
the layers, and transformers turns it into ``layer_types``. Reference: Yang et al., arXiv:2407.10671.
"""

from typing import TYPE_CHECKING

from gapless.model.families.family import Family, FamilyTraits, refuse_options, windows_by_layer_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["QWEN2"]


def _traits(config: "PretrainedConfig") -> FamilyTraits:
    refuse_options(config, "mlp_bias")
    return FamilyTraits(qkv_bias=True, windows=windows_by_layer_type(config))


QWEN2 = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", traits=_traits)
