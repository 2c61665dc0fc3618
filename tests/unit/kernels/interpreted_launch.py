"""Launches of interpreted kernels are the interpreter's (see test_kernels_interpreted)."""

import torch
import triton
import triton.language as tl

from gapless.kernels.launch import compile_only, launch_kernel

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def double_kernel(x, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + i, tl.load(x + i) * 2)


def test_interpreted_kernels_run_each_time_and_in_compile_only() -> None:
    x = torch.ones(32)
    for _ in range(2):
        launch_kernel(double_kernel, (2,), x, SIZE=16)
    assert x.tolist() == [4.0] * 32
    with compile_only():
        launch_kernel(double_kernel, (2,), x, SIZE=16)
    assert x.tolist() == [8.0] * 32
