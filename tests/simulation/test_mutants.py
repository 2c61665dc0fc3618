"""Every rule of the overlap is broken on purpose once, and the simulation must notice.

``tests/mutants/*.patch`` are the mutants: a line that says what is wrong, and a diff against ``src``. Each is applied
to a copy of the package, and a bounded number of seeds is run on the copy. The run has to fail by a failing seed (its
own exit code and message), and not because the copy cannot be imported.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.__main__ import FAILED_SEED

_TESTS = Path(__file__).parents[1]
_SOURCE = _TESTS.parent / "src" / "gapless"
_MUTANTS = sorted((_TESTS / "mutants").glob("*.patch"))
_SEEDS = 400
# A patch that makes nonsense of the code fails like this; that shows nothing about the rule it breaks.
_NONSENSE = ("NameError", "AttributeError", "TypeError", "UnboundLocalError")


def _copy_of_the_package(folder: Path) -> None:
    shutil.copytree(_SOURCE, folder / "gapless", ignore=shutil.ignore_patterns("__pycache__"))


def _simulate(folder: Path, seeds: int) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(_TESTS)]),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "simulation", "--seeds", str(seeds)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("patch", _MUTANTS, ids=lambda patch: patch.stem)
def test_the_simulation_catches(patch: Path, tmp_path: Path) -> None:
    _copy_of_the_package(tmp_path)
    # Outside a repository `git apply` works on plain files; one line of context has to match.
    applied = subprocess.run(
        ["git", "apply", "-p1", "-C1", str(patch)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, f"{patch.name} no longer applies to src: write it anew\n{applied.stderr}"

    done = _simulate(tmp_path, _SEEDS)

    assert done.returncode != 0, f"{_SEEDS} seeds did not notice {patch.name}: {patch.read_text().splitlines()[0]}"
    assert done.returncode == FAILED_SEED, f"the simulation could not run:\n{done.stdout}\n{done.stderr}"
    failure = re.search(r"FAILED seed \d+: (\w+)", done.stdout)
    assert failure, done.stdout
    assert failure[1] not in _NONSENSE, f"{patch.name} breaks the code and not a rule:\n{done.stdout}"


def test_the_simulation_passes_an_unchanged_copy(tmp_path: Path) -> None:
    _copy_of_the_package(tmp_path)

    done = _simulate(tmp_path, _SEEDS)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_copy_is_what_runs(tmp_path: Path) -> None:
    _copy_of_the_package(tmp_path)
    (tmp_path / "gapless" / "pipeline" / "ring.py").write_text("raise ImportError('the copy')\n")

    done = _simulate(tmp_path, 1)

    assert done.returncode not in (0, FAILED_SEED)
    assert "the copy" in done.stderr


def test_there_are_mutants() -> None:
    assert len(_MUTANTS) >= 20
