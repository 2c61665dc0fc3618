"""Mistral: Llama with one sliding window for all layers, or none where ``sliding_window`` is null.

Reference: Jiang et al., arXiv:2310.06825.
"""

from typing import TYPE_CHECKING

from gapless.errors import UnsupportedModelError
from gapless.model.families.family import Family, FamilyTraits, check_window, full_attention, refuse_options

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["MISTRAL"]


def _traits(config: "PretrainedConfig") -> FamilyTraits:
    refuse_options(config, "attention_bias", "mlp_bias")
    return FamilyTraits(windows=_windows(config))


def _windows(config: "PretrainedConfig") -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if window is None:
        return full_attention(config)
    check_window(window)
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "sliding_attention":
            raise UnsupportedModelError(
                f"layer_types has {kind!r} beside sliding_window={window}; a mistral model slides in every layer"
            )
    return (window,) * int(config.num_hidden_layers)


MISTRAL = Family(architecture="MistralForCausalLM", model_type="mistral", traits=_traits)
