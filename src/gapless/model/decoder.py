"""The decoder all supported families share: :class:`DecoderModel`, from token ids to logits.

RMSNorm, RoPE, grouped-query attention over the paged KV cache, SwiGLU. The query, key and value matrices are one
matrix, gate and up another, and biases and per-head norms likewise, so that a layer is few large operations.

Each layer writes the *whole step's* K and V before it attends: an entry may read, through a shared prefix block, what
another entry of the same step has just written (``test_prefix_hit_within_the_step``).

Weights are device state: written by the thread that loads, then only read, on the compute stream. ``forward`` makes
no host sync: Python's control flow depends on shapes and ``host_*`` lengths alone.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gapless.layers.attention import AttentionBackend
from gapless.layers.forward_inputs import ForwardInputs
from gapless.layers.linear import Linear
from gapless.layers.ops import LayerOps, Residual
from gapless.layers.rope import RopeTable
from gapless.model.families.weights import LoadReport, WeightSlot, fill_slots
from gapless.model.kv_cache import KVCache
from gapless.model.spec import ModelSpec

__all__ = ["DecoderLayer", "DecoderModel", "LoadReport"]

logger = logging.getLogger("gapless")

_HEAD_NAME = "lm_head.weight"
_DUMMY_STD = 0.02
_DUMMY_NORM_STD = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """One layer's weights.

    Attributes:
        attention_norm, mlp_norm: ``[hidden_size]``.
        qkv: ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]``: queries, keys, values.
        qk_norm: ``[num_heads + num_kv_heads, head_dim]``, the query weight repeated, then the key weight; or ``None``.
        o: ``[hidden_size, num_heads * head_dim]``.
        gate_up: ``[2 * intermediate_size, hidden_size]``.
        down: ``[hidden_size, intermediate_size]``.
        window: how many keys a token sees, itself included; ``None`` is all.
    """

    attention_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None

    @classmethod
    def empty(cls, spec: ModelSpec, index: int, dtype: torch.dtype, device: torch.device) -> "DecoderLayer":
        """A layer with uninitialised memory."""
        hidden, mlp, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
        rotated = spec.num_heads + spec.num_kv_heads
        qkv_width = (rotated + spec.num_kv_heads) * spec.head_dim
        norm = torch.empty(rotated, spec.head_dim, dtype=dtype, device=device) if spec.qk_norm else None
        return cls(
            attention_norm=torch.empty(hidden, dtype=dtype, device=device),
            qkv=Linear.empty(qkv_width, hidden, bias=spec.qkv_bias, dtype=dtype, device=device),
            qk_norm=norm,
            o=Linear.empty(hidden, width, bias=spec.o_bias, dtype=dtype, device=device),
            mlp_norm=torch.empty(hidden, dtype=dtype, device=device),
            gate_up=Linear.empty(2 * mlp, hidden, bias=spec.mlp_bias, dtype=dtype, device=device),
            down=Linear.empty(hidden, mlp, bias=spec.mlp_bias, dtype=dtype, device=device),
            window=spec.windows[index],
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's matrices."""
        return (self.qkv, self.o, self.gate_up, self.down)


class DecoderModel:
    """A decoder with its weights on one device.

    Args:
        spec: shape and options.
        dtype: of weights, activations and KV cache; norms, softmax and RoPE compute in fp32 whatever it is.
        device: where everything lives.
        max_model_len: the longest context in tokens; the RoPE table reaches that far.
        attention: the backend that reads the paged cache.
        ops: the rest of a layer.

    Raises:
        ConfigError: if the model's RoPE does not reach ``max_model_len``.

    The memory is uninitialised until :meth:`load_weights` or :meth:`init_dummy`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        attention: AttentionBackend[Any],
        ops: LayerOps,
    ) -> None:
        spec.check_max_model_len(max_model_len)
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.max_model_len = max_model_len
        self.attention = attention
        self.ops = ops
        self.rope = RopeTable(spec.rope, num_positions=max_model_len, device=device)
        self.embedding = torch.empty(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer.empty(spec, i, dtype, device) for i in range(spec.num_layers)]
        self.final_norm = torch.empty(spec.hidden_size, dtype=dtype, device=device)
        self.head = self._new_head()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all matrices, norms and the head, but of the embedding only some rows.

        On CUDA with a tied head this is also what the weights occupy; an untied model holds the embedding besides.
        """
        norms = self.final_norm.nbytes + sum(
            layer.attention_norm.nbytes + layer.mlp_norm.nbytes + (0 if layer.qk_norm is None else layer.qk_norm.nbytes)
            for layer in self.layers
        )
        return norms + self.head.nbytes + sum(linear.nbytes for layer in self.layers for linear in layer.linears)

    def forward(self, inputs: ForwardInputs, kv: KVCache) -> Tensor:
        """Run one step: writes this step's K and V and returns the logits of ``inputs.logits_indices``.

        Args:
            inputs: the step's inputs, on this model's device.
            kv: the cache, of this model's dtype; touched on the current stream only.

        Returns:
            ``[num_samples, vocab_size]``, fp32.
        """
        residual = self._run_layers(inputs, kv)
        # Only the tokens that are sampled meet the head: at 128k tokens of vocabulary it is a large part of a step.
        return self.logits(self.ops.final_norm(residual, self.final_norm, self.spec.norm_eps, inputs.logits_indices))

    def hidden_states(self, inputs: ForwardInputs, kv: KVCache) -> Tensor:
        """Run one step as :meth:`forward` does, for callers who want logits of other tokens than those that sample.

        Returns:
            ``[num_tokens, hidden_size]``, what :meth:`logits` reads.
        """
        residual = self._run_layers(inputs, kv)
        return self.ops.final_norm(residual, self.final_norm, self.spec.norm_eps, None)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]``, fp32, of hidden states, ``[n, hidden_size]``."""
        return self.ops.logits(hidden, self.head)

    def _run_layers(self, inputs: ForwardInputs, kv: KVCache) -> Residual:
        """The residual stream after all layers, ``[num_tokens, hidden_size]``."""
        plan = self.attention.plan(inputs, kv.block_size)
        rotation = self.rope.rotation(inputs.positions)
        residual = Residual(self.embedding.index_select(0, inputs.input_ids))
        eps, scale, ops = self.spec.norm_eps, self.spec.attention_scale, self.ops
        following = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        for layer, keys, values, next_norm in zip(self.layers, kv.keys, kv.values, following, strict=True):
            q = ops.project_heads(
                residual,
                layer.attention_norm,
                eps,
                layer.qkv,
                layer.qk_norm,
                rotation,
                keys,
                values,
                inputs.slot_mapping,
            )
            x = self.attention.attend(q, keys, values, plan, scale=scale, window=layer.window)
            residual = ops.add_product(residual, x, layer.o, layer.mlp_norm)
            x = ops.gated_product(residual, layer.mlp_norm, eps, layer.gate_up)
            residual = ops.add_product(residual, x, layer.down, next_norm)
        return residual

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> LoadReport:
        """Copy a checkpoint's tensors into place; may be called again with other weights.

        A tied model whose checkpoint holds a head that differs from the embedding uses that head, as transformers
        does, and says so in the log.

        Args:
            tensors: Hugging Face parameter names with their tensors, in any order; each is read once and let go.

        Raises:
            CheckpointError: naming the tensor that is missing, given twice, or of another shape or dtype. The model
                is then partly written and must not be used.
        """
        self._unpack()
        own_heads: list[tuple[str, Tensor]] = []
        filled, unknown = fill_slots(dict(self._slots()), self._without_tied_head(tensors, own_heads))
        if own_heads:
            self._load_own_head(own_heads)
        tied = self.spec.tied and self.head.weight is self.embedding
        self._pack()
        return LoadReport(num_loaded=len(filled) + len(own_heads), unknown=tuple(unknown), tied=tied)

    def init_dummy(self, seed: int) -> None:
        """Fill the weights with random numbers, made on the device; the same for the same seed on the same device.

        Matrices and biases get a standard deviation of 0.02, norm weights are 1 with a little noise.
        """
        self._unpack()
        generator = torch.Generator(device=self.device).manual_seed(seed)
        for name, slot in self._slots():
            repeated = slot.target.dim() > len(slot.shape)
            place = torch.empty(slot.shape, dtype=self.dtype, device=self.device) if repeated else slot.target
            if name.endswith("norm.weight"):
                place.normal_(1.0, _DUMMY_NORM_STD, generator=generator)
            else:
                place.normal_(0.0, _DUMMY_STD, generator=generator)
            if repeated:
                slot.target.copy_(place)
        self._pack()

    def _slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Where each tensor goes, by its Hugging Face name; the head only where it is not tied."""
        yield "model.embed_tokens.weight", _slot(self.embedding)
        for i, layer in enumerate(self.layers):
            yield from ((f"model.layers.{i}.{name}", slot) for name, slot in self._layer_slots(layer))
        yield "model.norm.weight", _slot(self.final_norm)
        if not self.spec.tied:
            yield _HEAD_NAME, _slot(self.head.weight)

    def _layer_slots(self, layer: DecoderLayer) -> Iterator[tuple[str, WeightSlot]]:
        spec = self.spec
        q, kv, mlp = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
        yield "input_layernorm.weight", _slot(layer.attention_norm)
        yield "post_attention_layernorm.weight", _slot(layer.mlp_norm)
        yield from _linear_slots(layer.qkv, {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv})
        yield from _linear_slots(layer.o, {"self_attn.o_proj": spec.hidden_size})
        yield from _linear_slots(layer.gate_up, {"mlp.gate_proj": mlp, "mlp.up_proj": mlp})
        yield from _linear_slots(layer.down, {"mlp.down_proj": spec.hidden_size})
        if layer.qk_norm is not None:
            size = (spec.head_dim,)
            yield "self_attn.q_norm.weight", WeightSlot(target=layer.qk_norm[: spec.num_heads], shape=size)
            yield "self_attn.k_norm.weight", WeightSlot(target=layer.qk_norm[spec.num_heads :], shape=size)

    def _without_tied_head(
        self, tensors: Iterable[tuple[str, Tensor]], own_heads: list[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """``tensors``, but a tied model's head goes to ``own_heads``: the embedding may come after it."""
        for name, tensor in tensors:
            if self.spec.tied and name == _HEAD_NAME:
                own_heads.append((name, tensor.clone()))
            else:
                yield name, tensor

    def _load_own_head(self, heads: list[tuple[str, Tensor]]) -> None:
        """Give a tied model the head of its checkpoint where that is not the embedding."""
        rows, columns = self.embedding.shape
        head = Linear.empty(rows, columns, bias=False, dtype=self.dtype, device=self.device)
        fill_slots({_HEAD_NAME: _slot(head.weight)}, heads)
        if not torch.equal(head.weight, self.embedding):
            logger.warning(
                "tie_word_embeddings is true, but %s in the checkpoint differs from the embedding; using the former",
                _HEAD_NAME,
            )
            self.head = head

    def _new_head(self) -> Linear:
        """The head before loading: the embedding's own memory where it is tied."""
        if self.spec.tied:
            return Linear(self.embedding)
        rows, columns = self.embedding.shape
        return Linear.empty(rows, columns, bias=False, dtype=self.dtype, device=self.device)

    def _pack(self) -> None:
        for layer in self.layers:
            for linear in layer.linears:
                linear.pack()
        self.head.pack()

    def _unpack(self) -> None:
        for layer in self.layers:
            for linear in layer.linears:
                linear.unpack()
        self.head = self._new_head()


def _slot(target: Tensor) -> WeightSlot:
    """A slot for a tensor of the target's own shape."""
    return WeightSlot(target=target, shape=tuple(target.shape))


def _linear_slots(linear: Linear, parts: dict[str, int]) -> Iterator[tuple[str, WeightSlot]]:
    """Slots of the matrices, and biases, stacked in ``linear``: ``parts`` gives names and output sizes in order."""
    weights = torch.split(linear.weight, list(parts.values()))
    yield from ((f"{name}.weight", _slot(part)) for name, part in zip(parts, weights, strict=True))
    if linear.bias is not None:
        biases = torch.split(linear.bias, list(parts.values()))
        yield from ((f"{name}.bias", _slot(part)) for name, part in zip(parts, biases, strict=True))
