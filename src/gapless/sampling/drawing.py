"""Drawing tokens from logits by one uniform number each: :func:`draw_tokens`.

The number is turned into a token by inverting the cumulative distribution in the order of token ids, so a request's
tokens depend on its seed and positions alone. This is the plain version, which sorts; a device may bring one that does
not (:mod:`gapless.kernels.draw`). Compute stream only.
"""

from typing import Protocol

import torch
from torch import Tensor

from gapless.sampling.filters import filter_logits

__all__ = ["Draw", "draw_tokens"]


class Draw(Protocol):
    """Draws a token for some samples; see :func:`draw_tokens`."""

    def __call__(
        self,
        logits: Tensor,
        samples: Tensor,
        maxima: Tensor,
        temperatures: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        numbers: Tensor,
        *,
        needs_filter: bool,
    ) -> Tensor:
        """Draw."""


def draw_tokens(
    logits: Tensor,
    samples: Tensor,
    maxima: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    numbers: Tensor,
    *,
    needs_filter: bool,
) -> Tensor:
    """Divide by the temperature, filter, and draw.

    Args:
        logits: ``[num_samples, vocab_size]``, fp32; not changed.
        samples: ``[n]``, int64: which of them are drawn.
        maxima: ``[num_samples]``, fp32: the largest logit of each row.
        temperatures, top_ps, min_ps: ``[n]``, fp32.
        top_ks: ``[n]``, int32; 0 keeps all.
        numbers: ``[n]``, fp64, in [0, 1).
        needs_filter: whether a sample has any of top_k, top_p and min_p.

    Returns:
        ``[n]``, int64; any token for a row whose logits are not numbers.
    """
    # Subtracting the maximum first keeps a tiny temperature finite: 0 / t is 0, the rest goes to -inf.
    tempered = (logits[samples] - maxima[samples][:, None]) / temperatures[:, None]
    if needs_filter:
        tempered = filter_logits(tempered, top_ks, top_ps, min_ps)
    cumulative = tempered.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    # The first token whose cumulative probability passes the target; never one of probability zero.
    drawn = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return drawn.clamp(max=logits.shape[-1] - 1)
