"""Everything the decoder needs to know of a checkpoint's config, checked and resolved: :class:`ModelSpec`.

A config that asks for something gapless does not do is refused here, by name and before any weight is touched, since
an ignored setting gives fluent nonsense and no error. Pure data, made once while loading, for any thread.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.errors import CheckpointError, ConfigError, UnsupportedModelError
from gapless.layers.rope import RopeSpec
from gapless.model.families import FAMILIES, Family
from gapless.model.families.rope_settings import rope_from_config
from gapless.model.kv_cache import KVShape

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ModelSpec", "kv_shape", "spec_from_config"]

_ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Shape and options of a decoder.

    Attributes:
        architecture: the checkpoint's architecture name, such as ``LlamaForCausalLM``.
        head_dim: size of a head; ``num_heads * head_dim`` need not be ``hidden_size``.
        norm_eps: added to the mean square in every RMSNorm.
        qkv_bias, o_bias, mlp_bias: which projections have biases.
        qk_norm: RMSNorm over each head of q and k, before RoPE.
        tied: the output head is the embedding, unless the checkpoint holds a head of its own.
        windows: for each layer how many keys a token sees, itself included; ``None`` is all.
        rope: frequencies of the rotary embedding.
        max_position_embeddings: the config's context length, in tokens; the default of ``max_model_len``.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]
    rope: RopeSpec
    max_position_embeddings: int

    @property
    def attention_scale(self) -> float:
        """Factor on attention scores."""
        return float(self.head_dim**-0.5)

    def check_max_model_len(self, max_model_len: int) -> None:
        """Raise :class:`ConfigError` unless the model's RoPE reaches ``max_model_len`` tokens."""
        if not 0 < max_model_len <= self.rope.max_positions:
            raise ConfigError(
                f"max_model_len={max_model_len} must be in [1, {self.rope.max_positions}], the positions this model's "
                f"RoPE of type {self.rope.kind!r} is made for; lower it, or extend rope_parameters in config.json"
            )


def spec_from_config(config: "PretrainedConfig") -> ModelSpec:
    """Resolve a config into a :class:`ModelSpec`.

    Raises:
        UnsupportedModelError: naming the architecture, setting or value that gapless does not have.
        CheckpointError: for a config that contradicts itself.
    """
    family = _family(config)
    _refuse_common(config)
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{name}={value!r} in the config must be a positive integer")
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    traits = family.traits(config)
    return ModelSpec(
        architecture=family.architecture,
        hidden_size=hidden,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_eps=float(config.rms_norm_eps),
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        windows=traits.windows,
        rope=rope_from_config(config, head_dim),
        max_position_embeddings=config.max_position_embeddings,
    )


def kv_shape(spec: ModelSpec, dtype: torch.dtype) -> KVShape:
    """What a token of context costs for this model with a KV cache of ``dtype``."""
    return KVShape(num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=dtype)


def _family(config: "PretrainedConfig") -> Family:
    """The config's family; one made in code may have no ``architectures``, and then ``model_type`` decides."""
    by_type = {family.model_type: family for family in FAMILIES.values()}
    names = getattr(config, "architectures", None)
    family = FAMILIES.get(names[0]) if names else by_type.get(config.model_type)
    if family is None:
        named = f"architecture {names[0]!r}" if names else f"model type {config.model_type!r}"
        raise UnsupportedModelError(f"{named} is not supported; supported: {', '.join(FAMILIES)}")
    if family.model_type != config.model_type:
        raise UnsupportedModelError(
            f"architecture {family.architecture!r} with model_type {config.model_type!r} is not supported; "
            f"expected model_type {family.model_type!r}"
        )
    return family


def _refuse_common(config: "PretrainedConfig") -> None:
    """Refuse what no family here has."""
    if getattr(config, "quantization_config", None) is not None:
        quantization = config.quantization_config
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(f"quantization_config ({method}) is not supported; use an unquantised checkpoint")
    activation = getattr(config, "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(f"hidden_act={activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
