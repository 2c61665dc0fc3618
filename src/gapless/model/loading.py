"""From a model's name to a :class:`LoadedModel`: open the checkpoint, allocate, fill.

The order is the point: configuration, headers and options are checked before memory is allocated, and memory is
allocated before a weight is read, so each fault shows at the cheapest moment. Weights go to the device one tensor at a
time. Runs on the thread that builds the engine, before any queue exists; the result is then only read.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from gapless.errors import CheckpointError, ConfigError
from gapless.layers.attention import AttentionBackend
from gapless.layers.ops import LayerOps
from gapless.model.checkpoint import (
    Checkpoint,
    LoadFormat,
    LoadStage,
    NoProgress,
    Progress,
    TokenizerSource,
    open_checkpoint,
)
from gapless.model.decoder import DecoderModel
from gapless.model.spec import ModelSpec

__all__ = ["DTypeName", "LoadStage", "LoadedModel", "NoProgress", "Progress", "load_model", "resolve_dtype"]

logger = logging.getLogger("gapless")

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
_SHOWN_NAMES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """A model ready to run, and what the rest of the engine needs to know about its checkpoint.

    Attributes:
        model: the decoder with its weights on the device.
        spec: its resolved shape and options.
        generation_config: the raw ``generation_config.json``; empty when there is none.
        eos_token_ids: every token that ends a generation; may be empty.
        tokenizer_source: where the text layer finds the tokenizer.
        dtype: of weights, activations and KV cache.
        config_max_model_len: the context length the configuration states, in tokens. It is not scaled again by RoPE
            settings.
    """

    model: DecoderModel
    spec: ModelSpec
    generation_config: dict[str, Any]
    eos_token_ids: frozenset[int]
    tokenizer_source: TokenizerSource
    dtype: torch.dtype
    config_max_model_len: int


def load_model(
    model: str | Path,
    *,
    load_format: LoadFormat = "auto",
    dtype: DTypeName = "auto",
    device: torch.device,
    max_model_len: int | None = None,
    attention: AttentionBackend[Any],
    ops: LayerOps,
    seed: int = 0,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model onto a device.

    Args:
        model: what :func:`gapless.model.checkpoint.open_checkpoint` takes.
        load_format: ``auto`` reads the weights, ``dummy`` draws random ones.
        dtype: see :func:`resolve_dtype`.
        device: where weights and activations live.
        max_model_len: the longest context in tokens; ``None`` for the configuration's.
        attention: the backend that the decoder calls.
        ops: the work between its matrix products.
        seed: of the random weights; unused with ``auto``.
        progress: told about stages and bytes; without it a download shows bars of its own on a terminal.

    Raises:
        ConfigError: an unknown option value, or a ``max_model_len`` that the model's RoPE does not reach.
        CheckpointError: the checkpoint is missing, damaged, incomplete or not to be trusted.
        UnsupportedModelError: it needs something gapless does not have, by name.
    """
    _check_dtype_name(dtype)
    checkpoint = open_checkpoint(model, load_format=load_format, progress=progress)
    progress = progress or NoProgress()
    spec = checkpoint.spec
    if load_format == "auto":
        _check_sizes(spec, checkpoint)
    chosen = resolve_dtype(dtype, device=device, trained=checkpoint.trained_dtype)
    length = spec.max_position_embeddings if max_model_len is None else max_model_len

    progress.stage("allocate model")
    decoder = DecoderModel(spec, dtype=chosen, device=device, max_model_len=length, attention=attention, ops=ops)
    if load_format == "dummy":
        progress.stage("draw random weights")
        decoder.init_dummy(seed)
    else:
        progress.stage("read weights")
        _fill(decoder, checkpoint, progress)
    return LoadedModel(
        model=decoder,
        spec=spec,
        generation_config=checkpoint.generation_config,
        eos_token_ids=checkpoint.eos_token_ids,
        tokenizer_source=checkpoint.tokenizer_source,
        dtype=chosen,
        config_max_model_len=spec.max_position_embeddings,
    )


def resolve_dtype(name: DTypeName, *, device: torch.device, trained: torch.dtype | None) -> torch.dtype:
    """Choose the dtype of weights and activations.

    ``auto`` is bf16 on a CUDA device that computes in it, and fp32 elsewhere: CPUs gain nothing from half types here,
    and fp16 is never chosen unasked, since values above 65504 overflow in models trained in bf16.

    Args:
        name: the user's choice.
        device: where the model will run.
        trained: the dtype the checkpoint states, if any; an explicit ``float16`` on a bf16 checkpoint logs a warning.

    Raises:
        ConfigError: ``name`` is unknown.
    """
    _check_dtype_name(name)
    if name == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    if name == "float16" and trained == torch.bfloat16:
        logger.warning(
            "dtype='float16' with a checkpoint trained in bfloat16: activations above 65504 overflow; "
            "prefer dtype='bfloat16' or 'auto'"
        )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _check_dtype_name(name: str) -> None:
    if name not in get_args(DTypeName):
        raise ConfigError(f"dtype={name!r} is unknown; use one of {', '.join(get_args(DTypeName))}")


def _check_sizes(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Check the sizes that memory is allocated by against the tensors, so that a config cannot ask for more.

    Filling the model checks every tensor; this looks at those that settle each size, before there is a model.
    """
    shapes = checkpoint.tensor_shapes()
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, spec.hidden_size)}
    per_layer = {
        "self_attn.q_proj": (spec.num_heads * spec.head_dim, spec.hidden_size),
        "self_attn.k_proj": (spec.num_kv_heads * spec.head_dim, spec.hidden_size),
        "mlp.gate_proj": (spec.intermediate_size, spec.hidden_size),
    }
    for layer in range(spec.num_layers):
        expected |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in per_layer.items()}
    for name, shape in expected.items():
        if name not in shapes:
            raise CheckpointError(
                f"the checkpoint has no tensor for {name}; it is incomplete or does not belong to this config"
            )
        if shapes[name] != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(shapes[name])}, expected {list(shape)}; "
                "the weights do not belong to this config"
            )


def _fill(decoder: DecoderModel, checkpoint: Checkpoint, progress: Progress) -> None:
    """Copy the checkpoint's tensors into the model and list, once, those it has no place for."""
    report = decoder.load_weights(checkpoint.tensors(progress.advance))
    if report.unknown:
        # Quoted: a name comes from an untrusted file and may hold control characters.
        names = ", ".join(map(repr, report.unknown[:_SHOWN_NAMES])) + (
            ", ..." if len(report.unknown) > _SHOWN_NAMES else ""
        )
        logger.warning("%d tensors of the checkpoint have no place in the model: %s", len(report.unknown), names)
