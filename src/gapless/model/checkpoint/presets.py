"""Published model shapes by name, for runs with random weights: benchmarks, tests and a first look without a download.

The numbers are those of the models' public configurations, except for the ``tiny-`` shapes, which are ours and small
enough for any laptop. Text goes through the plain byte tokenizer, so end and start tokens are its own.

The shapes are written as the content of a ``config.json``, and a test compares what is made of them with what
``transformers`` makes of them. It is not asked here: importing its configuration classes would be a large part of the
time to the first token (1.3 s on a laptop).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gapless.errors import CheckpointError
from gapless.layers.rope import RopeSpec
from gapless.model.checkpoint.base import Checkpoint, NoWeights, TokenizerSource
from gapless.model.families import FAMILIES
from gapless.model.spec import ModelSpec

__all__ = ["BYTES_VOCAB_SIZE", "PRESETS", "PRESET_NAMES", "open_preset"]

BYTES_VOCAB_SIZE = 260
"""The byte tokenizer's entries: 256 bytes, then start, end, and the two markers of a chat message."""
_BYTES_BOS, _BYTES_EOS = 256, 257


def _shape(
    model_type: str,
    *,
    vocab: int,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    rope: dict[str, Any],
    tied: bool,
    eps: float = 1e-5,
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default"} | rope,
        "tie_word_embeddings": tied,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "bos_token_id": _BYTES_BOS,
        "eos_token_id": _BYTES_EOS,
    }


def _llama3(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _qwen3(*, hidden: int, intermediate: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return _shape(
        "qwen3",
        vocab=151_936,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        context=40_960,
        rope={"rope_theta": 1_000_000.0},
        tied=tied,
        eps=1e-6,
    )


def _smollm2(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _shape(
        "llama",
        vocab=49_152,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=64,
        context=8192,
        rope={"rope_theta": 100_000.0 if hidden < 2048 else 130_000.0},
        tied=True,
    )


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "tiny-llama": _shape("llama", vocab=320, hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16,
                         context=2048, rope={"rope_theta": 10_000.0}, tied=True),
    "tiny-qwen3": _shape("qwen3", vocab=320, hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=32,
                         context=2048, rope={"rope_theta": 10_000.0}, tied=False, eps=1e-6),
    "smollm2-135m": _smollm2(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),
    "smollm2-360m": _smollm2(hidden=960, intermediate=2560, layers=32, heads=15, kv_heads=5),
    "smollm2-1.7b": _smollm2(hidden=2048, intermediate=8192, layers=24, heads=32, kv_heads=32),
    "llama-3.2-1b": _shape("llama", vocab=128_256, hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8,
                           head_dim=64, context=131_072, rope=_llama3(32.0), tied=True),
    "llama-3.2-3b": _shape("llama", vocab=128_256, hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8,
                           head_dim=128, context=131_072, rope=_llama3(32.0), tied=True),
    "llama-3.1-8b": _shape("llama", vocab=128_256, hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8,
                           head_dim=128, context=131_072, rope=_llama3(8.0), tied=False),
    "llama-3.1-70b": _shape("llama", vocab=128_256, hidden=8192, intermediate=28_672, layers=80, heads=64, kv_heads=8,
                            head_dim=128, context=131_072, rope=_llama3(8.0), tied=False),
    "mistral-7b": _shape("mistral", vocab=32_768, hidden=4096, intermediate=14_336, layers=32, heads=32, kv_heads=8,
                         head_dim=128, context=32_768, rope={"rope_theta": 1_000_000.0}, tied=False)
                  | {"sliding_window": None},
    "qwen2.5-0.5b": _shape("qwen2", vocab=151_936, hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2,
                           head_dim=64, context=32_768, rope={"rope_theta": 1_000_000.0}, tied=True, eps=1e-6),
    "qwen2.5-7b": _shape("qwen2", vocab=152_064, hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4,
                         head_dim=128, context=32_768, rope={"rope_theta": 1_000_000.0}, tied=False, eps=1e-6),
    "qwen3-0.6b": _qwen3(hidden=1024, intermediate=3072, layers=28, heads=16, tied=True),
    "qwen3-1.7b": _qwen3(hidden=2048, intermediate=6144, layers=28, heads=16, tied=True),
    "qwen3-4b": _qwen3(hidden=2560, intermediate=9728, layers=36, heads=32, tied=True),
    "qwen3-8b": _qwen3(hidden=4096, intermediate=12_288, layers=36, heads=32, tied=False),
    "qwen3-14b": _qwen3(hidden=5120, intermediate=17_408, layers=40, heads=40, tied=False),
    "qwen3-32b": _qwen3(hidden=5120, intermediate=25_600, layers=64, heads=64, tied=False),
}
# fmt: on

PRESET_NAMES: tuple[str, ...] = tuple(PRESETS)
"""Names that :func:`gapless.model.checkpoint.open_checkpoint` takes with ``load_format="dummy"``."""


def open_preset(name: str) -> Checkpoint:
    """Describe a preset as a checkpoint without weights.

    Raises:
        CheckpointError: no preset has this name.
    """
    if name not in PRESETS:
        raise CheckpointError(f"there is no preset {name!r}; the presets are {', '.join(PRESET_NAMES)}")
    spec = _spec_of(PRESETS[name])
    assert spec.vocab_size >= BYTES_VOCAB_SIZE
    return Checkpoint(
        spec=spec,
        trained_dtype=torch.bfloat16,
        config=None,
        generation_config={},
        eos_token_ids=frozenset({_BYTES_EOS}),
        tokenizer_source=TokenizerSource(kind="bytes", path=None, eos_token_id=_BYTES_EOS),
        weights=NoWeights(),
    )


def _spec_of(shape: Mapping[str, Any]) -> ModelSpec:
    family = next(family for family in FAMILIES.values() if family.model_type == shape["model_type"])
    return ModelSpec(
        architecture=family.architecture,
        hidden_size=shape["hidden_size"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        norm_eps=shape["rms_norm_eps"],
        qkv_bias=shape["model_type"] == "qwen2",
        o_bias=False,
        mlp_bias=False,
        qk_norm=shape["model_type"] == "qwen3",
        tied=shape["tie_word_embeddings"],
        windows=(None,) * shape["num_hidden_layers"],
        rope=_rope_of(shape["rope_parameters"], shape["head_dim"], shape["max_position_embeddings"]),
        max_position_embeddings=shape["max_position_embeddings"],
    )


def _rope_of(settings: Mapping[str, Any], head_dim: int, context: int) -> RopeSpec:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (settings["rope_theta"] ** exponents)
    if settings["rope_type"] == "llama3":
        frequencies = _stretched(frequencies, settings)
        context = max(context, int(settings["original_max_position_embeddings"] * settings["factor"]))
    return RopeSpec(
        kind=settings["rope_type"],
        inv_freq=tuple(frequencies.tolist()),
        attention_factor=1.0,
        max_positions=context,
    )


def _stretched(frequencies: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Llama 3.1's rule: waves longer than the original context are stretched, short ones kept, those between mixed.

    Source: Grattafiori et al., arXiv:2407.21783, and the configuration of the published models.
    """
    low, high, factor = (float(settings[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    wavelengths = 2 * math.pi / frequencies
    waves: Tensor = settings["original_max_position_embeddings"] / wavelengths  # in the original context
    kept = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies
