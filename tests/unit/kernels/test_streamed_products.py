"""Kernels in Gluon cannot be interpreted, but anywhere they can be compiled for Hopper: no spills, a ring that fits."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from gapless.kernels import streamed_products

HOPPER_SHARED_BYTES = 227 << 10
FP32, BF16 = "*fp32", "*bf16"


def box(rows: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, 128], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, 128],{layout!r}>"


def compiled(kernel: Any, arguments: dict[str, str], constants: dict[str, object]) -> Any:
    names = kernel.arg_names
    signature = {name: arguments.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if arguments.get(name, "").startswith("*")
    }
    source = GluonASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})


def assert_fits(binary: Any, ring_bytes: int, folder: Path) -> None:
    assert ring_bytes < binary.metadata.shared <= HOPPER_SHARED_BYTES
    (folder / "kernel.ptx").write_text(binary.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill", told) == ["0", "0"]


def assert_streams_before_it_waits(binary: Any, stages: int, boxes: int) -> None:
    """Each stage's weights are asked for before the kernel before has ended, and no token is."""
    before, after = binary.asm["ptx"].split("griddepcontrol.wait")
    copies = "cp.async.bulk.tensor.2d"
    assert before.count(copies) == stages * boxes
    assert after.count(copies) == stages + boxes + 1  # the first tokens, then both in the loop


@pytest.mark.parametrize(("tokens", "stages"), [(16, 10), (64, 6)])
def test_residual(tokens: int, stages: int, tmp_path: Path) -> None:
    arguments = {"weight": box(64), "x": box(tokens), "bias": BF16, "hidden": BF16, "next_norm": BF16}
    arguments |= {"weighted": BF16, "squares": FP32, "partials": FP32, "arrivals": "*i32", "num_tokens": "i32"}
    constants = {"N": 4096, "K": 14336, "SPLITS": 2, "STAGES": stages, "HAS_BIAS": True, "DEPENDENT_LAUNCH": True}
    binary = compiled(streamed_products._residual_kernel, arguments, constants)
    assert_fits(binary, stages * (64 + tokens) * 256, tmp_path)
    assert_streams_before_it_waits(binary, stages, 1)


def test_gate(tmp_path: Path) -> None:
    arguments = {"weight": box(64), "x": box(32), "squares": FP32, "out": BF16, "num_tokens": "i32", "eps": "fp32"}
    constants = {"N": 14336, "K": 4096, "STAGES": 4, "NUM_SQUARES": 64, "DEPENDENT_LAUNCH": True}
    binary = compiled(streamed_products._gate_kernel, arguments, constants)
    assert_fits(binary, 4 * (128 + 32) * 256, tmp_path)
    assert_streams_before_it_waits(binary, 4, 2)


def test_product(tmp_path: Path) -> None:
    arguments = {"weight": box(64), "x": box(32), "out": FP32, "num_tokens": "i32"}
    constants = {"N": 6144, "K": 4096, "SPLITS": 1, "STAGES": 5, "DEPENDENT_LAUNCH": True}
    binary = compiled(streamed_products._product_kernel, arguments, constants)
    assert_fits(binary, 5 * (64 + 32) * 256, tmp_path)
    assert_streams_before_it_waits(binary, 5, 1)
