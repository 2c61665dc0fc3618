"""What stands at the two ends of a step's model run: :class:`StepEdges`, and its form in plain torch.

The idea: before the model, tokens are carried over and positions become places in the cache; after it, sampled tokens
are remembered and written to the output. In torch that is some twenty operations of a few numbers each, and on a GPU
each costs a launch; there either end is one kernel (``gapless.kernels.step_edges``). No state; compute stream only.
"""

from typing import Protocol

import torch
from torch import Tensor

from gapless.layers.forward_inputs import TokenInputs
from gapless.pipeline.carry_over import apply_carry_over

__all__ = ["StepEdges", "TorchEdges"]


class StepEdges(Protocol):
    """The work before and after the model."""

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
        """Carry tokens over and find each token's place in the cache.

        Args:
            input_ids, carry, positions, token_rows: ``[num_tokens]``, int32, of the packed input.
            last_tokens: ``[max_rows + 1]``, int64.
            block_tables: ``[max_rows + 1, max_blocks_per_row]``, int32.
            block_size: tokens in a block.
        """
        ...

    def keep(self, tokens: Tensor, top: Tensor, rows: Tensor, last_tokens: Tensor, output: Tensor) -> None:
        """Remember sampled tokens by row and write the step's output.

        Args:
            tokens: ``[num_samples]``, int64.
            top: ``[num_samples]``, fp32: not finite where the logits were not.
            rows: ``[num_samples]``, int32: where in ``last_tokens`` they go.
            last_tokens: ``[max_rows + 1]``, int64.
            output: ``[2 * num_samples]``, int32: the tokens, then 1 where the logits were finite and 0 elsewhere.
        """
        ...


class TorchEdges:
    """Plain torch: the CPU's form, and the reference of the kernels."""

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
        """See :meth:`StepEdges.prepare`."""
        wide = positions.to(torch.int64)
        blocks = block_tables[token_rows, wide // block_size]
        return TokenInputs(
            input_ids=apply_carry_over(input_ids, carry, last_tokens),
            positions=wide,
            slot_mapping=blocks.to(torch.int64) * block_size + wide % block_size,
        )

    def keep(self, tokens: Tensor, top: Tensor, rows: Tensor, last_tokens: Tensor, output: Tensor) -> None:
        """See :meth:`StepEdges.keep`."""
        last_tokens.index_copy_(0, rows.to(torch.int64), tokens)
        output[: len(tokens)].copy_(tokens)
        output[len(tokens) :].copy_(top.isfinite())
