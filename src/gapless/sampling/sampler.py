"""From logits to tokens, on the compute stream: :class:`Sampler` and its state by row.

Greedy samples take the arg max. The others divide by the temperature in fp32, filter if one of them asks, and draw by
inverting the cumulative distribution at one counter-based uniform number, so that a request's tokens depend on its
seed and positions alone. Only rows that ask for something pay for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gapless.sampling.drawing import Draw, draw_tokens
from gapless.sampling.logprobs import DeviceLogprobs, all_logprobs, token_logprobs
from gapless.sampling.random_numbers import uniform
from gapless.sampling.wide_state import WideInits, WideSamples, WideState

__all__ = ["Largest", "RowParams", "SampleInputs", "Sampled", "Sampler", "largest_logits"]

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
        wide: samples with penalties, biases or bad words.
        rated: ``[r]``, int64: samples whose log-probs are wanted.
        num_top: how many top tokens each of them gets.
        full: ``[f]``, int64: samples that get the whole vocabulary's log-probs.
        process: a user's change of the logits.
    """

    rows: Tensor
    output_positions: Tensor
    random_samples: Tensor
    masked_samples: Tensor
    masked_tokens: Tensor
    needs_filter: bool
    wide: WideSamples | None = None
    rated: Tensor | None = None
    num_top: int = 0
    full: Tensor | None = None
    process: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a step sampled.

    Attributes:
        tokens: ``[num_samples]``, int64.
        top: ``[num_samples]``, fp32, the largest logits: not finite where the token means nothing.
        logprobs, full_logprobs: of those who ask.
    """

    tokens: Tensor
    top: Tensor
    logprobs: DeviceLogprobs | None = None
    full_logprobs: Tensor | None = None


Largest: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor]]


def largest_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row of ``logits: [n, vocab_size]``, and its first place, int64; NaN for a row with it.

    It is infinite in a row of nothing but ``-inf``, or with ``+inf``: so it is finite in healthy rows alone.
    """
    top, tokens = logits.max(dim=-1)
    return top, tokens


class Sampler:
    """Sampling parameters by row, and the sampling of a step.

    Args:
        max_rows: rows for requests; row ``max_rows`` is the reserved one.
        device: where the state lives.
        wide: state of penalties, biases and bad words; without it no request may have any.
        draw: a faster :func:`~gapless.sampling.drawing.draw_tokens`, if there is one.
        largest: a faster :func:`largest_logits`, if there is one.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        device: torch.device,
        wide: WideState | None = None,
        draw: Draw = draw_tokens,
        largest: Largest = largest_logits,
    ) -> None:
        size = max_rows + 1
        self._draw_tokens = draw
        self._largest = largest
        self._wide = wide
        self._temperature = torch.ones(size, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(size, dtype=torch.int32, device=device)
        self._top_p = torch.ones(size, dtype=torch.float32, device=device)
        self._min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self._seed = torch.zeros(size, dtype=torch.int64, device=device)

    def warm_up(self, vocab_size: int) -> None:
        """Draw once from nothing, so that the kernel for it is compiled before anybody waits."""
        device = self._seed.device
        self._draw_tokens(
            torch.zeros((1, vocab_size), device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(1, device=device),
            self._temperature[:1],
            self._top_k[:1],
            self._top_p[:1],
            self._min_p[:1],
            torch.zeros(1, dtype=torch.float64, device=device),
            needs_filter=True,
        )

    def set_rows(self, params: RowParams) -> None:
        """Give rows to new requests."""
        self._temperature.index_copy_(0, params.rows, params.temperature)
        self._top_k.index_copy_(0, params.rows, params.top_k)
        self._top_p.index_copy_(0, params.rows, params.top_p)
        self._min_p.index_copy_(0, params.rows, params.min_p)
        self._seed.index_copy_(0, params.rows, params.seed)

    def set_wide_rows(self, inits: WideInits) -> None:
        """Give wide rows to new requests."""
        assert self._wide is not None
        self._wide.set_rows(inits)

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        """Choose a token for each row of ``logits``, ``[num_samples, vocab_size]``, fp32 (may be overwritten)."""
        # Log-probs are those of the raw logits: a copy, made before anything changes them.
        raw = None if inputs.rated is None else logits.index_select(0, inputs.rated)
        full = None if inputs.full is None else all_logprobs(logits.index_select(0, inputs.full))
        if inputs.process is not None:
            logits = inputs.process(logits).contiguous()
        if inputs.wide is not None:
            assert self._wide is not None
            self._wide.apply(logits, inputs.wide)
        if len(inputs.masked_samples):
            mask = logits.new_full((1,), -torch.inf).expand(len(inputs.masked_samples))
            logits.index_put_((inputs.masked_samples, inputs.masked_tokens), mask)
        top, tokens = self._largest(logits)
        if len(inputs.random_samples):
            drawn = self._draw(logits, top, inputs)
            tokens = tokens.index_copy(0, inputs.random_samples, drawn)
        if inputs.wide is not None and self._wide is not None:
            self._wide.update(inputs.wide, tokens)
        logprobs = None
        if raw is not None and inputs.rated is not None:
            logprobs = token_logprobs(raw, tokens.index_select(0, inputs.rated), inputs.num_top)
        return Sampled(tokens=tokens, top=top, logprobs=logprobs, full_logprobs=full)

    def _draw(self, logits: Tensor, top: Tensor, inputs: SampleInputs) -> Tensor:
        which = inputs.random_samples
        rows = inputs.rows[which]
        return self._draw_tokens(
            logits,
            which,
            top,
            self._temperature[rows].clamp(min=_MIN_TEMPERATURE),
            self._top_k[rows],
            self._top_p[rows],
            self._min_p[rows],
            uniform(self._seed[rows], inputs.output_positions[which]),
            needs_filter=inputs.needs_filter,
        )
