"""Runs the kernels' CPU tests, each module in a process of its own with Triton's interpreter switched on.

Triton reads ``TRITON_INTERPRET`` when it is imported, for its own library functions too, and any test may have imported
it before in this process. The modules' names keep pytest from collecting them here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gapless.kernels

HERE = Path(__file__).parent
# The interpreter turns one-element arrays into numbers in a way that NumPy is giving up.
WARNING = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
SOURCE_ROOT = Path(gapless.kernels.__path__[0]).parents[1]


@pytest.mark.parametrize("module", sorted(path.name for path in HERE.glob("interpreted_*.py")))
def test_module_in_the_interpreter(module: str) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE_ROOT)}
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-W", WARNING]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / module)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
