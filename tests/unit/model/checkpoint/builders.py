"""Small real checkpoints for these tests: random models with random norms, written as safetensors or as GGUF."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fixtures.checkpoints import Arch, f_hist_model
from gapless.model.checkpoint import Checkpoint

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_model(arch: Arch = "llama", **changes: Any) -> PreTrainedModel:
    """An F-HIST model with a start and an end token."""
    return f_hist_model(arch, seed=20, **{"bos_token_id": 1, "eos_token_id": 2} | changes)


def model_of(checkpoint: Checkpoint) -> PreTrainedModel:
    """transformers' model for the checkpoint's configuration, with the checkpoint's tensors (none may be left over)."""
    model = AutoModelForCausalLM.from_config(checkpoint.config, dtype=torch.float32, attn_implementation="eager").eval()
    state = {name: tensor.float() for name, tensor in checkpoint.tensors()}
    result = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    assert set(result.missing_keys) <= tied
    assert result.unexpected_keys == []
    return model


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    """Logits at all positions of one fixed prompt of 24 tokens."""
    prompt = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(5))
    return model(prompt).logits[0]


@torch.inference_mode()
def greedy_ids_of(model: PreTrainedModel, count: int = 12) -> list[int]:
    """Greedy continuation of a fixed prompt, without stopping."""
    ids = [5, 9, 17, 33]
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[4:]


def save_sharded(model: PreTrainedModel, folder: Path) -> list[Path]:
    """Save as many small shards with an index; returns the shards."""
    model.save_pretrained(folder, max_shard_size="40KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 5
    return shards


def write_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file by hand, so that its header can lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K of llama: halves of a head become interleaved pairs."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    encoding: str = "F32",
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    stored: dict[str, tuple[np.ndarray, Any]] | None = None,
    architecture: str | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Write a model the way llama.cpp's converter does, vectors always as F32.

    Args:
        metadata: further keys (bool, int, float or str).
        extra: further F32 tensors.
        stored: further tensors as raw blocks, with their encoding.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture or model.config.model_type, split_max_tensors=split_max_tensors)
    _add_metadata(writer, model.config, metadata or {})
    qtype = gguf.GGMLQuantizationType[encoding]
    for name, array in _gguf_tensors(model, architecture or model.config.model_type).items():
        if array.ndim == 1 or encoding == "F32":
            writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, qtype), raw_dtype=qtype)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    for name, (blocks, raw_type) in (stored or {}).items():
        writer.add_tensor(name, blocks, raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer: Any, config: PretrainedConfig, further: dict[str, Any]) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in further.items():
        add[type(value)](key, value)


def _gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    """The model's tensors under GGUF names, Q and K reordered where llama.cpp does it."""
    config = model.config
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        base, kind = name.rsplit(".", 1)
        array = tensor.numpy()
        if base in GGUF_TOP:
            if not (config.tie_word_embeddings and base == "lm_head"):
                tensors[f"{GGUF_TOP[base]}.{kind}"] = array
            continue
        _, _, layer, part = base.split(".", 3)
        if architecture in ("llama", "mistral") and part in heads:
            array = permute(array, heads[part])
        tensors[f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"] = array
    return tensors
