"""Kernels in Gluon cannot be interpreted, but anywhere they can be compiled for Hopper, and what came out be read."""

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

HOPPER_SHARED_BYTES = 227 << 10


def box(rows: int, columns: int) -> str:
    """The type of a TMA descriptor of bf16 boxes."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"


def compiled(kernel: Any, arguments: dict[str, str], constants: dict[str, object]) -> Any:
    """The kernel with arguments of these types, pointers aligned."""
    names = kernel.arg_names
    signature = {name: arguments.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if arguments.get(name, "").startswith("*")
    }
    source = GluonASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True})


def assert_fits(binary: Any, ring_bytes: int, folder: Path) -> None:
    """The kernel's shared memory holds its ring, and its registers all that they should."""
    assert ring_bytes < binary.metadata.shared <= HOPPER_SHARED_BYTES
    (folder / "kernel.ptx").write_text(binary.asm["ptx"])
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    told = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    assert re.findall(r"(\d+) bytes spill", told) == ["0", "0"]
    # What ptxas says where it has to wait for each product before the next.
    assert "serialized" not in told
