"""From logits to tokens, on the compute stream: :class:`Sampler` and its state by row.

Greedy samples take the arg max. The others divide by the temperature in fp32, filter if one of them asks, and draw by
inverting the cumulative distribution at one counter-based uniform number, so that a request's tokens depend on its
seed and positions alone. Only rows that ask for something pay for it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gapless.sampling.filters import filter_logits
from gapless.sampling.random_numbers import uniform

__all__ = ["RowParams", "SampleInputs", "Sampled", "Sampler"]

# Below this a division could leave fp32's normal numbers; the draw is greedy long before.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParams:
    """Parameters of newly admitted requests; all ``[n]``: rows int64, top_k int32, seed int64, the rest fp32."""

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleInputs:
    """Which rows sample in this step.

    Attributes:
        rows: ``[num_samples]``, int64.
        output_positions: ``[num_samples]``, int32.
        random_samples: ``[n]``, int64: the samples that are drawn; the others are greedy.
        masked_samples, masked_tokens: ``[m]``, int64: pairs that may not be sampled.
        needs_filter: whether a drawn sample uses top_k, top_p or min_p.
    """

    rows: Tensor
    output_positions: Tensor
    random_samples: Tensor
    masked_samples: Tensor
    masked_tokens: Tensor
    needs_filter: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """``tokens``: ``[num_samples]``, int64; ``healthy``: ``[num_samples]``, bool."""

    tokens: Tensor
    healthy: Tensor


class Sampler:
    """Sampling parameters by row, and the sampling of a step."""

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        size = max_rows + 1
        self._temperature = torch.ones(size, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(size, dtype=torch.int32, device=device)
        self._top_p = torch.ones(size, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self._seed = torch.zeros(size, dtype=torch.int64, device=device)

    def set_rows(self, params: RowParams) -> None:
        """Give rows to new requests."""
        self._temperature.index_copy_(0, params.rows, params.temperature)
        self._top_k.index_copy_(0, params.rows, params.top_k)
        self._top_p.index_copy_(0, params.rows, params.top_p)
        self._min_p.index_copy_(0, params.rows, params.min_p)
        self._seed.index_copy_(0, params.rows, params.seed)

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        """Choose a token for each row of ``logits``, ``[num_samples, vocab_size]``, fp32 (may be overwritten)."""
        if len(inputs.masked_samples):
            mask = logits.new_full((1,), -torch.inf).expand(len(inputs.masked_samples))
            logits.index_put_((inputs.masked_samples, inputs.masked_tokens), mask)
        # The maximum of a row with NaN is NaN; one of nothing but -inf, or with +inf, is infinite. Neither is healthy.
        top, tokens = logits.max(dim=-1)
        if len(inputs.random_samples):
            drawn = self._draw(logits, top, inputs)
            tokens = tokens.index_copy(0, inputs.random_samples, drawn)
        return Sampled(tokens=tokens, healthy=top.isfinite())

    def _draw(self, logits: Tensor, top: Tensor, inputs: SampleInputs) -> Tensor:
        which = inputs.random_samples
        rows = inputs.rows[which]
        temperature = self._temperature[rows].clamp(min=_MIN_TEMPERATURE)
        # Subtracting the maximum first keeps a tiny temperature finite: 0 / t is 0, the rest goes to -inf.
        tempered = (logits[which] - top[which][:, None]) / temperature[:, None]
        if inputs.needs_filter:
            tempered = filter_logits(tempered, self._top_k[rows], self._top_p[rows], self._min_p[rows])
        cumulative = tempered.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
        target = uniform(self._seed[rows], inputs.output_positions[which])[:, None] * cumulative[:, -1:]
        # The first token whose cumulative probability passes the target; never one of probability zero.
        drawn = torch.searchsorted(cumulative, target, right=True)[:, 0]
        return drawn.clamp(max=logits.shape[-1] - 1)
