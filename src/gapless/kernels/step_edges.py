# Kernel bodies are Triton's language, not typed Python: only these three checks are off.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The two ends of a step on CUDA: one kernel before the model, two for the largest logit, one to keep the tokens.

The idea: these are a few numbers for each token, so launches are all they cost. The search for the largest logit is cut
along the vocabulary, so that a few rows still use the whole device; among equal logits the first wins in both parts,
whatever runs first, and NaN beats everything. References: ``gapless.pipeline.step_edges.TorchEdges`` and
``gapless.sampling.sampler.largest_logits``. No state; runs on the compute stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gapless.kernels.launch import launch_kernel
from gapless.layers.forward_inputs import TokenInputs

__all__ = ["TritonEdges", "largest_logits_triton"]

_TOKENS_BLOCK = 256
_VOCAB_BLOCK = 8192


@triton.jit(
    do_not_specialize=["num_tokens", "table_stride"],
    do_not_specialize_on_alignment=["input_ids", "carry", "positions", "token_rows"],
)
def _prepare_kernel(
    input_ids,
    carry,
    positions,
    token_rows,
    last_tokens,
    block_tables,
    out,
    num_tokens,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = t < num_tokens
    source = tl.load(carry + t, mask=live, other=-1)
    carried = tl.load(last_tokens + source, mask=source >= 0, other=0)
    position = tl.load(positions + t, mask=live, other=0)
    row = tl.load(token_rows + t, mask=live, other=0).to(tl.int64)
    block = tl.load(block_tables + row * table_stride + position // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    tl.store(out + t, tl.load(input_ids + t, mask=live, other=0).to(tl.int64) + carried, mask=live)
    tl.store(out + num_tokens + t, position.to(tl.int64), mask=live)
    tl.store(out + 2 * num_tokens + t, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)


@triton.jit
def _comparable(x):
    """NaN as infinity. With a NaN among them, a search for the largest may end at a masked element: no token at all."""
    return tl.where(x != x, float("inf"), x)


@triton.jit(do_not_specialize=["vocab_size"])
def _largest_in_part_kernel(logits, part_top, part_token, vocab_size, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    c = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * vocab_size + c, mask=c < vocab_size, other=float("-inf"))
    # NaN counts as larger than everything, as in torch; comparisons alone would pass it over.
    bad = tl.max((x != x).to(tl.int32), 0)
    top, at = tl.max(_comparable(x), 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(part_top + row * num_parts + part, tl.where(bad > 0, float("nan"), top))
    tl.store(part_token + row * num_parts + part, part * BLOCK + at)


@triton.jit
def _largest_of_parts_kernel(part_top, part_token, top_out, token_out, num_parts, PARTS: tl.constexpr):
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    x = tl.load(part_top + row * num_parts + p, mask=p < num_parts, other=float("-inf"))
    bad = tl.max((x != x).to(tl.int32), 0)
    top, at = tl.max(_comparable(x), 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(top_out + row, tl.where(bad > 0, float("nan"), top))
    tl.store(token_out + row, tl.load(part_token + row * num_parts + at).to(tl.int64))


@triton.jit(do_not_specialize=["num_samples"], do_not_specialize_on_alignment=["rows"])
def _keep_kernel(tokens, top, rows, last_tokens, output, num_samples, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < num_samples
    token = tl.load(tokens + i, mask=live, other=0)
    value = tl.load(top + i, mask=live, other=0.0)
    row = tl.load(rows + i, mask=live, other=0)
    tl.store(last_tokens + row, token, mask=live)
    tl.store(output + i, token.to(tl.int32), mask=live)
    finite = (value == value) & (tl.abs(value) != float("inf"))
    tl.store(output + num_samples + i, finite.to(tl.int32), mask=live)


class TritonEdges:
    """``gapless.pipeline.step_edges.StepEdges`` for CUDA devices."""

    def prepare(
        self,
        input_ids: Tensor,
        carry: Tensor,
        positions: Tensor,
        token_rows: Tensor,
        last_tokens: Tensor,
        block_tables: Tensor,
        block_size: int,
    ) -> TokenInputs:
        """See ``StepEdges.prepare``."""
        num_tokens = len(input_ids)
        out = torch.empty((3, num_tokens), dtype=torch.int64, device=input_ids.device)
        launch_kernel(
            _prepare_kernel,
            (triton.cdiv(num_tokens, _TOKENS_BLOCK),),
            input_ids,
            carry,
            positions,
            token_rows,
            last_tokens,
            block_tables,
            out,
            num_tokens,
            block_tables.stride(0),
            BLOCK_SIZE=block_size,
            BLOCK=_TOKENS_BLOCK,
            num_warps=4,
        )
        ids, places, slots = out.unbind(0)
        return TokenInputs(input_ids=ids, positions=places, slot_mapping=slots)

    def keep(self, tokens: Tensor, top: Tensor, rows: Tensor, last_tokens: Tensor, output: Tensor) -> None:
        """See ``StepEdges.keep``."""
        count = len(tokens)
        launch_kernel(
            _keep_kernel,
            (triton.cdiv(count, _TOKENS_BLOCK),),
            tokens,
            top,
            rows,
            last_tokens,
            output,
            count,
            BLOCK=_TOKENS_BLOCK,
            num_warps=4,
        )


def largest_logits_triton(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`gapless.sampling.sampler.largest_logits`; ``logits`` are contiguous."""
    assert logits.is_contiguous()
    count, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, _VOCAB_BLOCK)
    part_top = torch.empty((count, num_parts), dtype=torch.float32, device=logits.device)
    part_token = torch.empty((count, num_parts), dtype=torch.int32, device=logits.device)
    top = torch.empty(count, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    if count:
        launch_kernel(
            _largest_in_part_kernel,
            (count, num_parts),
            logits,
            part_top,
            part_token,
            vocab_size,
            num_parts,
            BLOCK=_VOCAB_BLOCK,
            num_warps=8,
        )
        launch_kernel(
            _largest_of_parts_kernel,
            (count,),
            part_top,
            part_token,
            top,
            tokens,
            num_parts,
            PARTS=triton.next_power_of_2(num_parts),
            num_warps=1,
        )
    return top, tokens
