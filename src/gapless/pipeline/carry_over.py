"""Carry-over: a token moves on the device from the step that sampled it into the step that reads it.

The host enqueues step N+1 before it has seen the tokens of step N. It writes placeholder id 0 where such a token
belongs, and the request's row in the carry index (-1 elsewhere). The source is one vector of last tokens by row,
written by sampling and read here, both on the compute stream; so any depth, any reordering of the batch, chunked
prefill and preemption are safe, and nothing is sized by what happens to be running.
"""

import torch
from torch import Tensor

__all__ = ["apply_carry_over"]


def apply_carry_over(input_ids: Tensor, carry: Tensor, last_tokens: Tensor) -> Tensor:
    """Add the carried tokens to the placeholders.

    Args:
        input_ids: ``[num_tokens]``, int32: known ids, 0 where a token is carried.
        carry: ``[max_tokens]`` with ``max_tokens >= num_tokens``, int32: the row to carry from, or -1.
        last_tokens: ``[max_rows + 1]``, int64: each row's latest sampled token.

    Returns:
        ``[num_tokens]``, int64: the ids that the model reads.
    """
    selected = last_tokens[carry.clamp(min=0)]
    carried = torch.where(carry >= 0, selected, 0)
    return input_ids + carried[: len(input_ids)]
