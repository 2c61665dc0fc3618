"""Paged attention: the protocol every backend implements, and the plain torch backend used on CPUs.

The idea: a model writes the step's K and V of a layer into the paged cache first and then calls ``attend``, which
reads every entry's whole context, this step's tokens included, through the block tables. Everything that is the same
for all layers (gather indices, masks, kernel launch sizes) is made once a step by ``plan``.

A backend holds no state of a step: it all lives in the plan, which the step owns. Both methods are called on the
thread that runs the compute stream, inside ``inference_mode``, and make no host sync.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from gapless.layers.forward_inputs import ForwardInputs

__all__ = ["AttentionBackend", "TorchAttention", "TorchPlan"]

PlanT = TypeVar("PlanT")

# Decode entries shorter than half of their group's longest context start a group of their own: padding costs at most
# one more gather of what is needed, and 16 contexts of 20 to 200 tokens make 3 groups. Below this length, one more
# call costs more than the padding.
_SHORT_CONTEXT = 64


class AttentionBackend(Protocol[PlanT]):
    """Causal grouped-query attention over a paged KV cache."""

    def plan(self, inputs: ForwardInputs, block_size: int) -> PlanT:
        """Prepare what all layers of one step share.

        Args:
            inputs: the step's inputs; only lengths, rows, tables and positions are read, never ``input_ids``.
            block_size: tokens per block of the cache, the unit of ``inputs.block_tables``.
        """
        ...

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: PlanT, *, scale: float, window: int | None
    ) -> Tensor:
        """Attend from each of the step's tokens to its own context, up to and including itself.

        Args:
            q: ``[num_tokens, num_heads, head_dim]``, the model's dtype, after RoPE; may be a strided view.
            keys: one layer of the cache, ``[num_slots, num_kv_heads, head_dim]``, addressed by
                ``block * block_size + offset``; this step's keys have been written.
            values: the same for values.
            plan: what :meth:`plan` returned for this step.
            scale: factor on the scores before softmax.
            window: each token sees at most this many keys, itself included; ``None`` is the whole context.

        Returns:
            ``[num_tokens, num_heads * head_dim]``, contiguous, in the dtype of ``q``.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodeGroup:
    """Entries of one token each whose contexts have about the same length, padded to ``num_keys``.

    Attributes:
        tokens: ``[entries]``, int64: where their tokens lie on the flat axis.
        slots: ``[entries * num_keys]``, int64. Padding repeats the entry's *own* last token, which is finite whenever
            the request is healthy: a masked key is multiplied by 0, and 0 * NaN would let a neighbour's stale NaN in.
        mask: ``[entries, 1, 1, num_keys]``, the dtype of q: 0 or -inf.
    """

    tokens: Tensor
    slots: Tensor
    mask: Tensor
    num_keys: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prefill:
    """One entry of several tokens.

    Attributes:
        start, end: its tokens on the flat axis.
        slots: ``[num_keys]``, int64: exactly the keys that some of its tokens see.
        mask: ``[end - start, num_keys]``, the dtype of q: 0 or -inf; ``None`` where plain causal masking is the same.
    """

    start: int
    end: int
    slots: Tensor
    mask: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _WindowPlan:
    """What layers of one window size share."""

    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_Prefill, ...]


class TorchPlan:
    """One step's gather indices and masks for each window size, made when a layer first asks for that size."""

    def __init__(self, inputs: ForwardInputs, block_size: int) -> None:
        self._inputs = inputs
        self._block_size = block_size
        self._starts = [0, *accumulate(inputs.host_query_lens)]
        self._windows: dict[int | None, _WindowPlan] = {}

    def for_window(self, window: int | None, dtype: torch.dtype) -> _WindowPlan:
        """Indices, and masks of ``dtype``, where a token sees at most ``window`` keys, itself included."""
        found = self._windows.get(window)
        if found is None:
            lens = self._inputs.host_query_lens
            found = _WindowPlan(
                decodes=tuple(self._decode_group(entries, window, dtype) for entries in self._decode_entries(window)),
                prefills=tuple(self._prefill(i, window, dtype) for i in range(len(lens)) if lens[i] > 1),
            )
            self._windows[window] = found
        return found

    def _decode_entries(self, window: int | None) -> list[list[int]]:
        """Entries of one token, longest context first, split into groups of similar length."""
        inputs = self._inputs
        sizes = {i: _visible(inputs.host_seq_lens[i], window) for i, n in enumerate(inputs.host_query_lens) if n == 1}
        groups: list[list[int]] = []
        for i in sorted(sizes, key=lambda i: -sizes[i]):
            longest = sizes[groups[-1][0]] if groups else 0
            if groups and (2 * sizes[i] >= longest or longest <= _SHORT_CONTEXT):
                groups[-1].append(i)
            else:
                groups.append([i])
        return groups

    def _decode_group(self, entries: list[int], window: int | None, dtype: torch.dtype) -> _DecodeGroup:
        inputs = self._inputs
        num_keys = _visible(inputs.host_seq_lens[entries[0]], window)
        chosen = self._to_device(entries)
        seq_lens = inputs.seq_lens.index_select(0, chosen).to(torch.int64)[:, None]
        seen = seq_lens if window is None else seq_lens.clamp(max=window)
        offsets = torch.arange(num_keys, device=seq_lens.device)
        positions = torch.minimum(seq_lens - seen + offsets, seq_lens - 1)
        rows = inputs.rows.index_select(0, chosen).to(torch.int64)[:, None]
        hidden = (offsets >= seen)[:, None, None, :]
        return _DecodeGroup(
            tokens=inputs.query_starts.index_select(0, chosen).to(torch.int64),
            slots=self._slots(rows, positions).flatten(),
            mask=_additive(hidden, dtype),
            num_keys=num_keys,
        )

    def _prefill(self, entry: int, window: int | None, dtype: torch.dtype) -> _Prefill:
        inputs = self._inputs
        length, seq_len = inputs.host_query_lens[entry], inputs.host_seq_lens[entry]
        first = 0 if window is None else max(0, seq_len - length - window + 1)
        device = inputs.block_tables.device
        keys = torch.arange(first, seq_len, device=device)
        mask = None
        if length < seq_len or (window is not None and window < seq_len):
            queries = torch.arange(seq_len - length, seq_len, device=device)[:, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = _additive(hidden, dtype)
        # A slice: indexing by a tensor without axes would wait for the device to learn its value.
        row = inputs.rows[entry : entry + 1].to(torch.int64)
        start = self._starts[entry]
        return _Prefill(start=start, end=start + length, slots=self._slots(row, keys), mask=mask)

    def _slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Cache slots of ``positions`` in the contexts of ``rows``; both broadcast."""
        size = self._block_size
        blocks = self._inputs.block_tables[rows, positions // size].to(torch.int64)
        return blocks * size + positions % size

    def _to_device(self, entries: list[int]) -> Tensor:
        device = self._inputs.rows.device
        # Pinned, so that on CUDA the copy is enqueued and not waited for.
        host = torch.tensor(entries, dtype=torch.int64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)


class TorchAttention:
    """The reference backend: gathers each context by slot and calls ``scaled_dot_product_attention``.

    Decode entries are batched in groups of similar context length with the query heads of a KV head as the query
    axis, since each torch call takes the interpreter lock and some microseconds; prefill entries go one by one.
    """

    def plan(self, inputs: ForwardInputs, block_size: int) -> TorchPlan:
        """See :meth:`AttentionBackend.plan`."""
        return TorchPlan(inputs, block_size)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, plan: TorchPlan, *, scale: float, window: int | None
    ) -> Tensor:
        """See :meth:`AttentionBackend.attend`."""
        num_tokens, num_heads, head_dim = q.shape
        out = q.new_empty(num_tokens, num_heads * head_dim)
        parts = plan.for_window(window, q.dtype)
        for group in parts.decodes:
            out.index_copy_(0, group.tokens, _attend_decodes(q, keys, values, group, scale))
        for prefill in parts.prefills:
            out[prefill.start : prefill.end] = _attend_prefill(q, keys, values, prefill, scale)
        return out


def _attend_decodes(q: Tensor, keys: Tensor, values: Tensor, group: _DecodeGroup, scale: float) -> Tensor:
    """``[entries, num_heads * head_dim]`` of one group."""
    entries, kv_heads = group.tokens.shape[0], keys.shape[1]
    num_heads, head_dim = q.shape[1:]
    picked = q.index_select(0, group.tokens).view(entries, kv_heads, num_heads // kv_heads, head_dim)
    shape = (entries, group.num_keys, kv_heads, head_dim)
    k = keys.index_select(0, group.slots).view(shape).transpose(1, 2)
    v = values.index_select(0, group.slots).view(shape).transpose(1, 2)
    result = F.scaled_dot_product_attention(picked, k, v, attn_mask=group.mask, scale=scale)
    return result.reshape(entries, num_heads * head_dim)


def _attend_prefill(q: Tensor, keys: Tensor, values: Tensor, prefill: _Prefill, scale: float) -> Tensor:
    """``[tokens of the entry, num_heads * head_dim]``."""
    queries = q[prefill.start : prefill.end].transpose(0, 1)[None]
    k = keys.index_select(0, prefill.slots).transpose(0, 1)[None]
    v = values.index_select(0, prefill.slots).transpose(0, 1)[None]
    mask = prefill.mask
    result = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return result[0].transpose(0, 1).reshape(prefill.end - prefill.start, -1)


def _visible(seq_len: int, window: int | None) -> int:
    """How many keys the last token of a context sees."""
    return seq_len if window is None else min(seq_len, window)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen and -inf where it is hidden: torch's CPU kernel would turn a boolean mask into this."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
