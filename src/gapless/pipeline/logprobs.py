"""Log-probs in a step: what is asked for (:class:`LogprobWork`), and the part of the output they take.

The samples that ask are named in the tail of the packed input, and so are the prompt tokens to be rated: the token at
position ``p`` is rated under the logits of position ``p - 1``, so a chunk's last token rates the first one of the next
chunk, whose id the host knows. Results follow the sampled tokens in the step's output, and only the used part is copied
back: a block of ``n`` ratings has the chosen tokens' log-probs, their ranks, the top ids and the top log-probs.

The host's half belongs to the engine thread; the views of the device are used on the compute stream.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gapless.sampling.logprobs import DeviceLogprobs
from gapless.sampling_params import ALL_LOGPROBS, MAX_LOGPROBS

__all__ = [
    "HostLogprobs",
    "LogprobBuilder",
    "LogprobLimits",
    "LogprobWork",
    "PromptSpan",
    "block_bytes",
    "device_block",
    "host_block",
]

_MAX_FULL_ROWS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobLimits:
    """How much a step may give.

    Attributes:
        max_top: most top tokens of a rating; at most the vocabulary.
        max_prompt_tokens: most prompt tokens rated in a step.
        max_full_rows: most samples in a step that get the log-probs of the whole vocabulary.
        vocab_size: how many those are.
    """

    max_top: int = MAX_LOGPROBS
    max_prompt_tokens: int = 0
    max_full_rows: int = 0
    vocab_size: int = 0

    @staticmethod
    def of_engine(*, token_budget: int, vocab_size: int) -> "LogprobLimits":
        """Limits for an engine.

        Of pinned memory, for each step in flight, the prompt's part takes 0.7 MB at most, and the full rows 2 MB for a
        vocabulary of 128k.
        """
        return LogprobLimits(
            max_top=min(MAX_LOGPROBS, vocab_size),
            max_prompt_tokens=min(token_budget, 4096),
            max_full_rows=_MAX_FULL_ROWS,
            vocab_size=vocab_size,
        )

    @property
    def full_bytes(self) -> int:
        """What full rows take at most."""
        return 4 * self.max_full_rows * self.vocab_size


class PromptSpan(NamedTuple):
    """The prompt tokens ``[first, first + num_tokens)`` of a request, side by side in the step's prompt ratings."""

    request_id: int
    first: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobWork:
    """What a step rates.

    Attributes:
        samples: the samples whose tokens are rated, ascending.
        num_top: most top tokens that one of them asks for.
        full_samples: the samples that get the whole vocabulary's log-probs, ascending; none of ``samples``.
        prompt_spans: the prompt tokens that are rated.
        prompt_indices: where on the step's token axis the logits for them are made.
        prompt_tokens: the tokens themselves.
        num_prompt_top: most top tokens that one of them asks for.
    """

    samples: tuple[int, ...]
    num_top: int
    full_samples: tuple[int, ...]
    prompt_spans: tuple[PromptSpan, ...]
    prompt_indices: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    num_prompt_top: int

    @property
    def num_bytes(self) -> int:
        """What the ratings take in the output, full rows left out."""
        return block_bytes(len(self.samples), self.num_top) + block_bytes(len(self.prompt_tokens), self.num_prompt_top)


@dataclass(kw_only=True, slots=True)
class LogprobBuilder:
    """Collects a step's ratings."""

    samples: list[int] = field(default_factory=list)
    full_samples: list[int] = field(default_factory=list)
    num_top: int = 0
    num_prompt_tokens: int = 0
    num_prompt_top: int = 0
    spans: list[PromptSpan] = field(default_factory=list)
    indices: list[NDArray[np.int32]] = field(default_factory=list)
    tokens: list[NDArray[np.int32]] = field(default_factory=list)

    def add_sample(self, sample: int, wanted: int, max_top: int) -> None:
        """Rate the token of a sample and the ``wanted`` most likely ones, ``max_top`` at most; or all of them."""
        if wanted == ALL_LOGPROBS:
            self.full_samples.append(sample)
            return
        self.samples.append(sample)
        self.num_top = max(self.num_top, min(wanted, max_top))

    def add_prompt(self, span: PromptSpan, tokens: NDArray[np.int32], index: int, num_top: int) -> None:
        """Rate prompt tokens, int32, under the logits of the step's tokens from ``index`` on."""
        self.spans.append(span)
        self.indices.append(np.arange(index, index + span.num_tokens, dtype=np.int32))
        self.tokens.append(tokens)
        self.num_prompt_tokens += span.num_tokens
        self.num_prompt_top = max(self.num_prompt_top, num_top)

    def build(self) -> LogprobWork | None:
        """The step's work; ``None`` if there is none."""
        if not (self.samples or self.full_samples or self.spans):
            return None
        empty = np.empty(0, dtype=np.int32)
        return LogprobWork(
            samples=tuple(self.samples),
            num_top=self.num_top,
            full_samples=tuple(self.full_samples),
            prompt_spans=tuple(self.spans),
            prompt_indices=np.concatenate(self.indices) if self.spans else empty,
            prompt_tokens=np.concatenate(self.tokens) if self.spans else empty,
            num_prompt_top=self.num_prompt_top,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLogprobs:
    """A block on the host; shapes as in :class:`~gapless.sampling.logprobs.DeviceLogprobs`."""

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top: NDArray[np.float32]


def block_bytes(count: int, num_top: int) -> int:
    """Bytes of a block of ``count`` ratings."""
    return 4 * count * (2 + 2 * num_top)


def device_block(output: Tensor, offset: int, count: int, num_top: int) -> DeviceLogprobs:
    """Views of a block in the device output, bytes, at ``offset``."""
    words = output[offset : offset + block_bytes(count, num_top)].view(torch.int32)
    ids_end = count * (2 + num_top)
    return DeviceLogprobs(
        chosen=words[:count].view(torch.float32),
        ranks=words[count : 2 * count],
        top_ids=words[2 * count : ids_end].view(count, num_top),
        top=words[ids_end:].view(torch.float32).view(count, num_top),
    )


def host_block(output: NDArray[np.uint8], offset: int, count: int, num_top: int) -> HostLogprobs:
    """Copies of a block of the host output."""
    words = output[offset : offset + block_bytes(count, num_top)].view(np.int32).copy()
    ids_end = count * (2 + num_top)
    return HostLogprobs(
        chosen=words[:count].view(np.float32),
        ranks=words[count : 2 * count],
        top_ids=words[2 * count : ids_end].reshape(count, num_top),
        top=words[ids_end:].view(np.float32).reshape(count, num_top),
    )
