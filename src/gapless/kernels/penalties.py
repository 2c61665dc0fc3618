# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Penalties in one pass over the logits: :func:`apply_penalties_triton`.

The plain version (:func:`gapless.sampling.penalties.apply_penalties`) reads and writes each logit some ten times. Here
each is read once with its word of history, and written once; that is all the memory traffic there has to be.
"""

import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.launch import launch_kernel

__all__ = ["apply_penalties_triton"]

_BLOCK = 1024
_PROMPT_BIT = 1 << 30


@triton.jit
def _penalise(
    logits,  # [num_samples, vocab_size], fp32
    samples,  # [n], int64
    rows,  # [n], int64
    history,  # [num_wide_rows, vocab_size], int32
    values,  # [num_wide_rows, 3], fp32
    vocab_size,
    PROMPT_BIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, j) does block j of the vocabulary for the i-th penalised sample."""
    which = tl.program_id(0)
    row = tl.load(rows + which)
    sample = tl.load(samples + which)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(history + row * vocab_size + token, mask=inside, other=0)
    repetition = tl.load(values + row * 3)
    frequency = tl.load(values + row * 3 + 1)
    presence = tl.load(values + row * 3 + 2)
    place = logits + sample * vocab_size + token
    x = tl.load(place, mask=inside, other=0.0)
    count = word & (PROMPT_BIT - 1)
    repeated = tl.where(x > 0, x / repetition, x * repetition)
    y = tl.where(word != 0, repeated, x)
    y = y - frequency * count.to(tl.float32) - tl.where(count > 0, presence, 0.0)
    # Tokens that were never there keep their very bits, and need no write.
    tl.store(place, y, mask=inside & (word != 0))


def apply_penalties_triton(logits: Tensor, samples: Tensor, rows: Tensor, history: Tensor, values: Tensor) -> None:
    """Penalise some samples in place; as the plain version, up to the rounding of a fused multiply-add.

    Args:
        logits: ``[num_samples, vocab_size]``, fp32, contiguous, changed in place.
        samples, rows: ``[n]``, int64: samples that are penalised, and their rows of the tables.
        history: ``[num_wide_rows, vocab_size]``, int32: output counts, and bit 30 for tokens of the prompt.
        values: ``[num_wide_rows, 3]``, fp32: repetition, frequency, presence.
    """
    vocab_size = logits.shape[1]
    assert logits.is_contiguous()
    assert history.shape[1] == vocab_size
    grid = (len(samples), triton.cdiv(vocab_size, _BLOCK))
    launch_kernel(
        _penalise, grid, logits, samples, rows, history, values, vocab_size, PROMPT_BIT=_PROMPT_BIT, BLOCK=_BLOCK
    )
