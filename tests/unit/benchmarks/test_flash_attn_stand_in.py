"""Runs the stand-in's tests in a process with Triton's interpreter switched on, as the kernels' tests are run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gapless

HERE = Path(__file__).parent
# The interpreter turns one-element arrays into numbers in a way that NumPy is giving up.
WARNING = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"


def test_the_stand_in_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    source_root = str(Path(gapless.__path__[0]).parent)
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": source_root}
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "-W", WARNING]
    command = [sys.executable, "-m", "pytest", *options, str(HERE / "interpreted_stand_in.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
