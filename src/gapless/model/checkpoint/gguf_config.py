"""From GGUF metadata to a ``transformers`` configuration.

``transformers`` has a mapping of its own (``AutoConfig.from_pretrained(..., gguf_file=...)``). It is not used, since it
leaves out RoPE scaling and Qwen3's head size without a word, and parses the whole vocabulary first; a test compares
the two on a real file. Here a key that would change the numbers and cannot be expressed is refused by name.
Pure functions; any thread.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.checkpoint.gguf_header import GgufHeader, GgufTensorInfo, GgufValue
from gapless.model.checkpoint.json_files import build_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["PERMUTED_ARCHITECTURES", "SUPPORTED_ARCHITECTURES", "architecture_of", "config_from_gguf", "stop_ids_of"]

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
PERMUTED_ARCHITECTURES = frozenset({"llama", "mistral"})
"""llama.cpp rotates these in interleaved pairs, so its converter reorders the rows of Q and K."""

# Keys under the architecture's prefix that change the numbers, with the values at which they do nothing.
_NEUTRAL: dict[str, tuple[GgufValue, ...]] = {
    "expert_count": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
_STOP_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# llama3 scaling as published; the factor and the original length are found from the tensor.
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0


class _Keys:
    """Typed look-ups of one architecture's keys, each error naming the key and the value found."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self.metadata = header.metadata
        self.path = header.path
        self.prefix = architecture

    def _fail(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {self.prefix}.{key} is {value!r}; it must be {wanted}")

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self._fail(key, value, "one whole number above 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._fail(key, value, "one finite number above 0")
        return float(value)

    def word(self, key: str, default: str) -> str:
        value = self.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, str):
            raise self._fail(key, value, "a string")
        return value

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def refuse_unless_neutral(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self.metadata.get(f"{self.prefix}.{key}", neutral[0])
            if value not in neutral:
                raise UnsupportedModelError(f"{self.path}: {self.prefix}.{key}={value!r} is not supported")


def architecture_of(header: GgufHeader) -> str:
    """Return ``general.architecture``, refusing those that are not supported.

    Raises:
        UnsupportedModelError: another architecture, named.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise UnsupportedModelError(f"{header.path}: the GGUF architecture {name!r} is not supported (known: {known})")
    return name


def stop_ids_of(header: GgufHeader, vocab_size: int) -> tuple[int, ...]:
    """End tokens named by the metadata: end of text first, then end of turn and of message, where present."""
    values = (header.metadata.get(key) for key in _STOP_KEYS)
    return tuple(value for value in values if type(value) is int and 0 <= value < vocab_size)


def config_from_gguf(
    header: GgufHeader, tensors: Mapping[str, GgufTensorInfo], rope_freqs: npt.NDArray[np.float32] | None
) -> "PretrainedConfig":
    """Build the configuration of a GGUF checkpoint.

    Args:
        header: the header with the model's metadata (of the first part, when split).
        tensors: infos of all parts; shapes settle what the metadata leaves open.
        rope_freqs: ``[head_dim / 2]``, the divisors of ``rope_freqs.weight``; ``None`` when it is absent.

    Raises:
        CheckpointError: metadata is missing, of the wrong type, or does not fit the tensors.
        UnsupportedModelError: an architecture or feature that cannot be expressed.
    """
    architecture = architecture_of(header)
    keys = _Keys(header, architecture)
    keys.refuse_unless_neutral()
    vocab_size = _rows(tensors, "token_embd.weight", header)
    heads = keys.whole("attention.head_count")
    head_dim, rest = divmod(_rows(tensors, "blk.0.attn_q.weight", header), heads)
    if rest or head_dim % 2:
        raise CheckpointError(f"{header.path}: blk.0.attn_q.weight does not divide into {heads} heads of even size")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if (size := keys.whole(key, head_dim)) != head_dim:
            raise UnsupportedModelError(f"{header.path}: {architecture}.{key}={size} with heads of {head_dim}")

    context = keys.whole("context_length")
    window = keys.whole("attention.sliding_window", context)
    if window < context and architecture not in PERMUTED_ARCHITECTURES:
        raise UnsupportedModelError(f"{header.path}: {architecture}.attention.sliding_window={window}")
    stop_ids = stop_ids_of(header, vocab_size)
    raw: dict[str, Any] = {
        "model_type": architecture,
        "vocab_size": vocab_size,
        "hidden_size": keys.whole("embedding_length"),
        "intermediate_size": keys.whole("feed_forward_length"),
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope_parameters(keys, context, head_dim, rope_freqs),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "eos_token_id": stop_ids[0] if stop_ids else None,
        "bos_token_id": _token(header, "tokenizer.ggml.bos_token_id", vocab_size),
        "pad_token_id": _token(header, "tokenizer.ggml.padding_token_id", vocab_size),
    }
    if architecture in PERMUTED_ARCHITECTURES:
        raw |= {"model_type": "mistral", "sliding_window": window} if window < context else {"model_type": "llama"}
    types = {info.type_name for info in tensors.values()}
    raw["dtype"] = "bfloat16" if "BF16" in types else "float16" if "F16" in types else "float32"
    return build_config(raw, str(header.path))


def _rows(tensors: Mapping[str, GgufTensorInfo], name: str, header: GgufHeader) -> int:
    info = tensors.get(name)
    if info is None or len(info.shape) != 2:
        raise CheckpointError(f"{header.path} has no matrix {name!r}; download it again")
    return info.shape[0]


def _token(header: GgufHeader, key: str, vocab_size: int) -> int | None:
    value = header.metadata.get(key)
    return value if isinstance(value, int) and 0 <= value < vocab_size else None


def _rope_parameters(
    keys: _Keys, context: int, head_dim: int, rope_freqs: npt.NDArray[np.float32] | None
) -> dict[str, Any]:
    """The ``rope_parameters`` of a configuration, from scaling keys or from the tensor of divisors."""
    theta = keys.real("rope.freq_base", 10_000.0)
    factor = keys.real("rope.scaling.factor", keys.real("rope.scale_linear", 1.0))
    # llama.cpp takes a factor without a type as linear.
    kind = keys.word("rope.scaling.type", "linear")
    parameters: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"{keys.path}: {keys.prefix}.rope.scaling.type={kind!r} is not supported")
    if kind == "linear" and factor != 1.0:
        parameters |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        attention = keys.real("rope.scaling.attn_factor", keys.real("rope.scaling.yarn_attn_factor", 1.0))
        parameters |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": keys.whole("rope.scaling.original_context_length", context),
            "beta_fast": keys.real("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.real("rope.scaling.yarn_beta_slow", 1.0),
            "attention_factor": attention * (0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0),
        }
    if rope_freqs is None or np.all(rope_freqs == 1.0):
        return parameters
    if parameters["rope_type"] != "default":
        raise UnsupportedModelError(f"{keys.path}: rope_freqs.weight together with {kind!r} scaling is not supported")
    return parameters | _scaling_of_divisors(rope_freqs, theta, head_dim, keys)


def _scaling_of_divisors(divisors: npt.NDArray[np.float32], theta: float, head_dim: int, keys: _Keys) -> dict[str, Any]:
    """Find the scaling whose frequencies are the unscaled ones divided by ``divisors``.

    llama.cpp writes llama3 scaling as one divisor for each frequency. With wavelengths ``w``, original length ``L``
    and bounds 1 and 4 the divisor is 1 below ``L / 4``, the factor above ``L``, and in between
    ``1 / ((1 - s) / factor + s)`` with ``s = (L / w - 1) / (4 - 1)``. ``L`` is searched among the powers of two.

    Raises:
        UnsupportedModelError: no such scaling gives these divisors.
    """
    factor = float(divisors.max())
    if divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all() and divisors.min() > 0:
        if divisors.min() == factor:
            return {"rope_type": "linear", "factor": factor}
        wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        for exponent in range(2, 24):
            length = 2**exponent
            smooth = np.clip((length / wavelengths - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
            if np.allclose(1.0 / ((1.0 - smooth) / factor + smooth), divisors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": _LLAMA3_LOW,
                    "high_freq_factor": _LLAMA3_HIGH,
                    "original_max_position_embeddings": length,
                }
    raise UnsupportedModelError(
        f"{keys.path}: rope_freqs.weight {list(divisors.shape)} is no linear or llama3 scaling that can be expressed"
    )
