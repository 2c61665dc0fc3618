"""Runs a model over its KV cache: :class:`ModelRunner`, and what the largest step needs in memory.

Whoever makes the runner owns both; ``forward`` is called on the thread that runs the compute stream.
"""

import torch
from torch import Tensor

from gapless.garbage import without_garbage_collection
from gapless.layers.forward_inputs import ForwardInputs
from gapless.model.decoder import DecoderModel
from gapless.model.kv_cache import KVCache
from gapless.model.spec import kv_shape

__all__ = ["ModelRunner", "idle_inputs", "measure_activation_peak"]


class ModelRunner:
    """A model and the cache it writes."""

    def __init__(self, model: DecoderModel, kv: KVCache) -> None:
        assert kv.shape == kv_shape(model.spec, model.dtype), "the cache was made for another model"
        self.model = model
        self.kv = kv

    def forward(self, inputs: ForwardInputs) -> Tensor:
        """``[num_samples, vocab_size]`` logits, fp32; see :meth:`DecoderModel.forward`."""
        return self.model.forward(inputs, self.kv)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.model.spec.vocab_size

    def hidden_states(self, inputs: ForwardInputs) -> Tensor:
        """``[num_tokens, hidden_size]``; see :meth:`DecoderModel.hidden_states`."""
        return self.model.hidden_states(inputs, self.kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocab_size]``, fp32, of some tokens' hidden states."""
        return self.model.logits(hidden)


def idle_inputs(query_lens: tuple[int, ...], *, max_rows: int, block_size: int, device: torch.device) -> ForwardInputs:
    """Inputs of a step in which nobody takes part: every entry is on the reserved row, whose blocks are block 0.

    Args:
        query_lens: tokens of each entry, which start at position 0. Each entry samples.
        max_rows: rows of the block tables, the reserved one not counted; it is the last.
        block_size: tokens per block.
        device: where the tensors are made.
    """
    lens = torch.tensor(query_lens, dtype=torch.int64)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0)))
    positions = torch.cat([torch.arange(n) for n in query_lens])
    blocks = -(-max(query_lens) // block_size)
    return ForwardInputs(
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=(positions % block_size).to(device),
        query_starts=starts.to(device, torch.int32),
        seq_lens=lens.to(device, torch.int32),
        rows=torch.full((len(query_lens),), max_rows, dtype=torch.int32, device=device),
        block_tables=torch.zeros(max_rows + 1, blocks, dtype=torch.int32, device=device),
        logits_indices=(starts[1:] - 1).to(device),
        host_query_lens=query_lens,
        host_seq_lens=query_lens,
    )


def measure_activation_peak(model: DecoderModel, *, token_budget: int, max_rows: int, block_size: int) -> int:
    """Bytes that the largest step needs beyond weights and cache, measured by running it.

    Counted are the bytes that tensors ask for. What the allocator hands out is up to 1 MiB more a tensor and hangs on
    the blocks that it has at hand, so it would differ from one engine of a process to the next.

    The step has ``token_budget`` tokens spread over as many entries as there are rows and tokens for, all of which
    sample. Synchronises the device and resets its peak statistics: call it before serving, on the compute stream.

    Args:
        model: a model on a CUDA device, with weights in it.
        token_budget: most tokens in a step.
        max_rows: most entries in a step.
        block_size: tokens per block of the cache to come; a cache of the reserved block alone is made for the run.
    """
    device = model.device
    assert device.type == "cuda", "only CUDA counts its allocations"
    kv = KVCache(kv_shape(model.spec, model.dtype), num_blocks=0, block_size=block_size, device=device)
    entries = min(max_rows, token_budget)
    tokens = min(token_budget, entries * model.max_model_len)
    lens = tuple(tokens // entries + (i < tokens % entries) for i in range(entries))
    inputs = idle_inputs(lens, max_rows=max_rows, block_size=block_size, device=device)
    torch.cuda.synchronize(device)
    with torch.inference_mode(), without_garbage_collection():
        torch.cuda.reset_peak_memory_stats(device)
        before: int = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
        model.forward(inputs, kv)
        torch.cuda.synchronize(device)
        peak: int = torch.cuda.memory_stats(device)["requested_bytes.all.peak"]
    return peak - before
