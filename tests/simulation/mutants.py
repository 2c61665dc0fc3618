"""Mutants as patches: applying one to a copy of the package, and writing one from an edited copy.

A patch is a line that says which rule it breaks, and hunks without context: the removed lines of each are unique in
their file, and `git apply` searches for them. So a mutant survives whatever moves or changes around it, and stops
applying when the very lines it breaks are changed. To write one, copy ``src/gapless``, break the copy, and run
``python -m simulation.mutants NAME "what is broken" FOLDER_WITH_THE_COPY``.
"""

import os
import shutil
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

__all__ = ["MUTANTS", "SOURCE", "apply_mutant", "copy_package", "write_mutant"]

_TESTS = Path(__file__).parents[1]
SOURCE = _TESTS.parent / "src" / "gapless"
MUTANTS = _TESTS / "mutants"


def copy_package(folder: Path) -> None:
    """Copy the package to ``folder/gapless``."""
    shutil.copytree(SOURCE, folder / "gapless", ignore=shutil.ignore_patterns("__pycache__"))


def apply_mutant(patch: Path, folder: Path) -> str:
    """Apply ``patch`` to the copy in ``folder``; returns what `git apply` complains of, nothing if it applies."""
    applied = subprocess.run(
        ["git", "apply", "-p1", "--unidiff-zero", str(patch)],
        # Inside a repository of somebody else's, git would skip the files without a word.
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return applied.stderr if applied.returncode else ""


def write_mutant(name: str, what: str, folder: Path) -> Path:
    """Write the patch that makes the package into the edited copy in ``folder``."""
    text = f"{what}\n\n"
    for source in sorted(SOURCE.rglob("*.py")):
        relative = source.relative_to(SOURCE)
        old = source.read_text().splitlines(keepends=True)
        new = (folder / "gapless" / relative).read_text().splitlines(keepends=True)
        if old != new:
            text += f"--- a/gapless/{relative}\n+++ b/gapless/{relative}\n" + _hunks(old, new)
    patch = MUTANTS / f"{name}.patch"
    patch.write_text(text)
    return patch


def _hunks(old: list[str], new: list[str]) -> str:
    text, done = "", 0
    for what, i, end, j, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if what == "equal":
            continue
        # Lines before it are removed and added again until what is removed is found nowhere else.
        while not "".join(old[i:end]).strip() or _occurrences(old, old[i:end]) > 1:
            i, j = i - 1, j - 1
            if i < done:
                raise ValueError(f"the change at line {end} has no unique place after the one before it")
        text += f"@@ -{i + 1},{end - i} +{j + (new_end > j)},{new_end - j} @@\n"
        text += "".join(f"-{line}" for line in old[i:end]) + "".join(f"+{line}" for line in new[j:new_end])
        done = end
    return text


def _occurrences(lines: list[str], block: list[str]) -> int:
    return sum(lines[i : i + len(block)] == block for i in range(len(lines) - len(block) + 1))


if __name__ == "__main__":
    print(write_mutant(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
