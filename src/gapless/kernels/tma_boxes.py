"""How TMA reads a matrix box by box, for kernels in Gluon: :func:`boxes_of`. No state."""

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["boxes_of"]


def boxes_of(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The argument by which a kernel copies boxes of ``matrix``; what a box has past the matrix's ends is zeros.

    Args:
        matrix: ``[any, any]``, bf16 or fp16, with unit stride in its columns.
        rows, columns: of a box.
    """
    layout = _layout(rows, columns, matrix.dtype)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a box in shared memory; made once, which takes as long as a launch."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16 if dtype == torch.float16 else gl.bfloat16)
