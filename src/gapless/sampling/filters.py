"""top_k, top_p and min_p over tempered logits, for each row its own values.

Applied in the order of transformers' processors: temperature, top_k, top_p (of what top_k left), min_p.
"""

import torch
from torch import Tensor

__all__ = ["filter_logits"]


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set what the filters drop to -inf; the most likely token always stays.

    Args:
        logits: ``[n, vocab_size]``, fp32, divided by the temperature.
        top_k: ``[n]``, integers; 0 or less keeps all.
        top_p: ``[n]``, fp32, in (0, 1].
        min_p: ``[n]``, fp32, in [0, 1].

    Returns:
        ``[n, vocab_size]``, fp32.
    """
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)
    kept = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    # Ties with the k-th token stay, as in transformers.
    kth = ordered.gather(1, (kept.clamp(max=vocab_size) - 1).to(torch.int64))
    ordered = ordered.masked_fill(ordered < kth, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    drop = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    drop |= probabilities < min_p[:, None] * probabilities[:, :1]
    drop &= rank > 0
    return torch.empty_like(logits).scatter_(1, order, ordered.masked_fill(drop, -torch.inf))
