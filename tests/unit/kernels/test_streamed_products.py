"""The kernels of streamed products, compiled for Hopper: no spills, a ring that fits, weights before the wait."""

from pathlib import Path
from typing import Any

import pytest

from gapless.kernels import streamed_products
from unit.kernels.for_hopper import assert_fits, box, compiled

FP32, BF16 = "*fp32", "*bf16"


def assert_streams_before_it_waits(binary: Any, stages: int, boxes: int) -> None:
    """Each stage's weights are asked for before the kernel before has ended, and no token is."""
    before, after = binary.asm["ptx"].split("griddepcontrol.wait")
    copies = "cp.async.bulk.tensor.2d"
    assert before.count(copies) == stages * boxes
    assert after.count(copies) == stages + boxes + 1  # the first tokens, then both in the loop


@pytest.mark.parametrize(("tokens", "stages"), [(16, 10), (64, 6)])
def test_residual(tokens: int, stages: int, tmp_path: Path) -> None:
    arguments = {"weight": box(64, 128), "x": box(tokens, 128), "bias": BF16, "hidden": BF16, "next_norm": BF16}
    arguments |= {"weighted": BF16, "squares": FP32, "partials": FP32, "arrivals": "*i32", "num_tokens": "i32"}
    constants = {"N": 4096, "K": 14336, "SPLITS": 2, "STAGES": stages, "HAS_BIAS": True, "DEPENDENT_LAUNCH": True}
    binary = compiled(streamed_products._residual_kernel, arguments, constants)
    assert_fits(binary, stages * (64 + tokens) * 256, tmp_path)
    assert_streams_before_it_waits(binary, stages, 1)


def test_gate(tmp_path: Path) -> None:
    arguments = {
        "weight": box(64, 128),
        "x": box(32, 128),
        "squares": FP32,
        "out": BF16,
        "num_tokens": "i32",
        "eps": "fp32",
    }
    constants = {"N": 14336, "K": 4096, "STAGES": 4, "NUM_SQUARES": 64, "DEPENDENT_LAUNCH": True}
    binary = compiled(streamed_products._gate_kernel, arguments, constants)
    assert_fits(binary, 4 * (128 + 32) * 256, tmp_path)
    assert_streams_before_it_waits(binary, 4, 2)


def test_product(tmp_path: Path) -> None:
    arguments = {"weight": box(64, 128), "x": box(32, 128), "out": FP32, "num_tokens": "i32"}
    constants = {"N": 6144, "K": 4096, "SPLITS": 1, "STAGES": 5, "DEPENDENT_LAUNCH": True}
    binary = compiled(streamed_products._product_kernel, arguments, constants)
    assert_fits(binary, 5 * (64 + 32) * 256, tmp_path)
    assert_streams_before_it_waits(binary, 5, 1)
