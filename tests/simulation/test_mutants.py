"""Every rule of the overlap is broken on purpose once, and the simulation must notice.

``tests/mutants/*.patch`` are the mutants: a line that says what is wrong, and a diff against ``src``. Each is applied
to a copy of the package, and a bounded number of seeds is run on the copy. The run has to fail by a failing seed (its
own exit code and message), and not because the copy cannot be imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.__main__ import FAILED_SEED
from simulation.mutants import MUTANTS, apply_mutant, copy_package, write_mutant

_TESTS = Path(__file__).parents[1]
_PATCHES = sorted(MUTANTS.glob("*.patch"))
_SEEDS = 400
# A patch that makes nonsense of the code fails like this; that shows nothing about the rule it breaks.
_NONSENSE = ("NameError", "AttributeError", "TypeError", "UnboundLocalError")


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


@pytest.mark.parametrize("patch", _PATCHES, ids=lambda patch: patch.stem)
def test_the_simulation_catches(patch: Path, tmp_path: Path) -> None:
    copy_package(tmp_path)
    complaint = apply_mutant(patch, tmp_path)
    assert not complaint, f"{patch.name} no longer applies to src: write it anew\n{complaint}"

    done = _simulate(tmp_path, _SEEDS)

    assert done.returncode != 0, f"{_SEEDS} seeds did not notice {patch.name}: {patch.read_text().splitlines()[0]}"
    assert done.returncode == FAILED_SEED, f"the simulation could not run:\n{done.stdout}\n{done.stderr}"
    failure = re.search(r"FAILED seed \d+: (\w+)", done.stdout)
    assert failure, done.stdout
    assert failure[1] not in _NONSENSE, f"{patch.name} breaks the code and not a rule:\n{done.stdout}"


def test_the_simulation_passes_an_unchanged_copy(tmp_path: Path) -> None:
    copy_package(tmp_path)

    done = _simulate(tmp_path, _SEEDS)

    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_copy_is_what_runs(tmp_path: Path) -> None:
    copy_package(tmp_path)
    (tmp_path / "gapless" / "pipeline" / "ring.py").write_text("raise ImportError('the copy')\n")

    done = _simulate(tmp_path, 1)

    assert done.returncode not in (0, FAILED_SEED)
    assert "the copy" in done.stderr


def test_a_patch_written_from_an_edited_copy_makes_that_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edited, patched = tmp_path / "edited", tmp_path / "patched"
    copy_package(edited)
    copy_package(patched)
    ring = edited / "gapless" / "pipeline" / "ring.py"
    lines = ring.read_text().splitlines(keepends=True)
    ring.write_text("".join([*lines[:9], "# inserted\n", *lines[9:-3], lines[-1]]))
    monkeypatch.setattr("simulation.mutants.MUTANTS", tmp_path)

    patch = write_mutant("an_edit", "Nothing in particular.", edited)

    assert apply_mutant(patch, patched) == ""
    assert (patched / "gapless" / "pipeline" / "ring.py").read_text() == ring.read_text()
    assert "ring.py" in apply_mutant(patch, patched), "the lines are gone now"


def test_there_are_mutants() -> None:
    assert len(_PATCHES) >= 20
