"""Log-probabilities of tokens under the model's raw logits: :func:`token_logprobs`.

They are the log-softmax of the logits as the model gives them, before biases, penalties, temperature and filters, so
they do not change with the sampling options. Computed for the rows that ask only. Compute stream only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LOGPROB_FLOOR", "DeviceLogprobs", "all_logprobs", "token_logprobs"]

LOGPROB_FLOOR = -9999.0
"""Stands for -inf: an impossible token, in a form that JSON can carry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLogprobs:
    """Log-probs of ``n`` tokens, each with the ``k`` most likely ones at its place.

    Attributes:
        chosen: ``[n]``, fp32: of the tokens that were asked for.
        ranks: ``[n]``, int32: their place among all tokens, from 1; equal ones share the best place.
        top_ids: ``[n, k]``, int32: the most likely tokens, in falling order.
        top: ``[n, k]``, fp32: their log-probs.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> DeviceLogprobs:
    """Rate ``tokens`` under ``logits``.

    Args:
        logits: ``[n, vocab_size]``, fp32.
        tokens: ``[n]``, int64.
        num_top: how many of the most likely tokens to name; at most the vocabulary.

    Returns:
        Values of at least ``LOGPROB_FLOOR``, and NaN throughout a row whose logits are not numbers.
    """
    # The maximum goes first, as in every stable softmax, but also from the single values: that keeps their last bits.
    most = logits.amax(dim=-1, keepdim=True)
    total = (logits - most).exp_().sum(dim=-1, keepdim=True).log_()
    chosen = logits.gather(1, tokens[:, None])
    top, top_ids = logits.topk(num_top, dim=-1)
    return DeviceLogprobs(
        chosen=(chosen - most - total).clamp(min=LOGPROB_FLOOR)[:, 0],
        ranks=((logits > chosen).sum(dim=-1) + 1).to(torch.int32),
        top_ids=top_ids.to(torch.int32),
        top=(top - most - total).clamp(min=LOGPROB_FLOOR),
    )


def all_logprobs(logits: Tensor) -> Tensor:
    """The log-softmax of ``logits``, ``[n, vocab_size]``, fp32, at least ``LOGPROB_FLOOR``."""
    return logits.log_softmax(dim=-1).clamp(min=LOGPROB_FLOOR)
