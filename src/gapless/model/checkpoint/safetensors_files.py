"""A folder of safetensors: which files count, and a walk over their tensors.

The rule for which files count, in this order:

1. ``model.safetensors.index.json``: the files and tensors it lists, and nothing else in the folder.
2. ``model.safetensors``: that file alone; other ``*.safetensors`` files are ignored, with a log line.
3. Exactly one ``*.safetensors`` file: that one.
4. Several without an index: refused, since loading all of them may mix two models.

Every header is checked when the folder is opened, so a missing, short or wrong file is found before any weight is
touched. The files stay mapped only while they are walked.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from safetensors import SafetensorError, safe_open
from torch import Tensor

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.checkpoint.base import ProgressCallback
from gapless.model.checkpoint.json_files import read_json_object
from gapless.model.checkpoint.safetensors_header import TensorEntry, read_safetensors_header

__all__ = ["INDEX_NAME", "PICKLE_SUFFIXES", "SINGLE_NAME", "SafetensorsWeights", "indexed_files", "open_safetensors"]

logger = logging.getLogger("gapless")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """One file and the tensors wanted from it, in the order in which they lie there."""

    path: Path
    entries: tuple[TensorEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsWeights:
    """The tensors of a checked set of safetensors files."""

    files: tuple[_File, ...]

    @property
    def total_bytes(self) -> int:
        """Size of all tensors as stored."""
        return sum(entry.nbytes for file in self.files for entry in file.entries)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, file by file."""
        return {entry.name: entry.shape for file in self.files for entry in file.entries}

    def tensors(self, on_progress: ProgressCallback | None) -> Iterator[tuple[str, Tensor]]:
        """Yield views of the mapped files, one file mapped at a time."""
        done, total = 0, self.total_bytes
        for file in self.files:
            try:
                with safe_open(str(file.path), framework="pt", device="cpu") as mapped:
                    for entry in file.entries:
                        yield entry.name, mapped.get_tensor(entry.name)
                        done += entry.nbytes
                        if on_progress is not None:
                            on_progress(done, total)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file.path} cannot be read: {error}") from error


def open_safetensors(folder: Path) -> SafetensorsWeights:
    """Find the folder's weight files by the module's rule and check all of their headers.

    Raises:
        CheckpointError: no weights, no clear choice, or a file that is missing, short or wrong.
        UnsupportedModelError: the folder holds pickles only.
    """
    index = folder / INDEX_NAME
    if index.exists() or index.is_symlink():  # A dangling link is an interrupted download, not a missing index.
        return _open_indexed(index)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    chosen = folder / SINGLE_NAME
    if chosen not in found:
        if not found:
            raise _no_weights(folder)
        if len(found) > 1:
            names = ", ".join(path.name for path in found[:4]) + (", ..." if len(found) > 4 else "")
            raise CheckpointError(
                f"{folder} has {len(found)} safetensors files ({names}) and no {INDEX_NAME} that says which belong "
                f"together; download the index, or keep one file named {SINGLE_NAME}"
            )
        chosen = found[0]
    if others := [path.name for path in found if path != chosen]:
        logger.warning("%s: reading %s and ignoring %s", folder, chosen.name, ", ".join(others))
    return SafetensorsWeights(files=(_wanted_of(chosen, read_safetensors_header(chosen)),))


def _wanted_of(path: Path, entries: dict[str, TensorEntry]) -> _File:
    return _File(path=path, entries=tuple(sorted(entries.values(), key=lambda entry: (entry.begin, entry.name))))


def _open_indexed(index: Path) -> SafetensorsWeights:
    """Check every file that the index names, and that each holds the tensors it is said to hold."""
    files = []
    for name, tensors in _tensors_by_file(index).items():
        path = index.parent / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; {index.name} says it holds {tensors[0]!r} and {len(tensors) - 1} more tensors; "
                "complete the download"
            )
        entries = read_safetensors_header(path)
        if absent := [tensor for tensor in tensors if tensor not in entries]:
            raise CheckpointError(f"{path} does not hold the tensor {absent[0]!r} that {index.name} places there")
        if unlisted := len(entries) - len(tensors):
            logger.info("%s: %d tensors that the index does not place there are ignored", path, unlisted)
        files.append(_wanted_of(path, {tensor: entries[tensor] for tensor in tensors}))
    return SafetensorsWeights(files=tuple(files))


def indexed_files(index: Path) -> list[str]:
    """The files that an index names, in order; none of them is looked for.

    Raises:
        CheckpointError: the index is damaged, or names something that cannot be a file of weights beside it.
    """
    return list(_tensors_by_file(index))


def _tensors_by_file(index: Path) -> dict[str, list[str]]:
    """Which tensors the index places in which file, by the files' names in order."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map; download it again")
    wanted: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        wanted.setdefault(_inside_name(name, index), []).append(tensor)
    return dict(sorted(wanted.items()))


def _inside_name(name: object, index: Path) -> str:
    """Check that a file name of the index stays inside the folder (a hub cache's links out of it are its own)."""
    if (
        not isinstance(name, str)
        or not name.endswith(".safetensors")
        or any(char in name for char in "\\:\0")
        or PurePosixPath(name).is_absolute()
        or ".." in PurePosixPath(name).parts
    ):
        raise CheckpointError(f"{index} names the file {name!r}; it must be a *.safetensors file inside the folder")
    return name


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return UnsupportedModelError(
            f"{folder} holds its weights as pickle ({pickles[0]}), which can run code and is never read; "
            "convert it to safetensors with transformers' save_pretrained"
        )
    return CheckpointError(f"{folder} holds no *.safetensors file; complete the download, or use load_format='dummy'")
