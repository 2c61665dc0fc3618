"""Writing a recording to a file whose name says what it holds: :func:`save`.

========================  ==========================================================================
``.png``, ``.svg``        the picture
``.trace.json``           a trace for ui.perfetto.dev or chrome://tracing
``.json``                 numbers for machines
========================  ==========================================================================

A file is written whole or not at all, see :mod:`gapless.whole_files`.
Any thread may call it; see :mod:`gapless.timeline.picture` for pictures.
"""

import json
import os
from pathlib import Path

from gapless.errors import ConfigError
from gapless.timeline.numbers import numbers_of
from gapless.timeline.spans import Recording
from gapless.timeline.trace_events import write_trace
from gapless.whole_files import write_whole

__all__ = ["SUFFIXES", "check_target", "save"]

SUFFIXES = (".png", ".svg", ".trace.json", ".json")
"""What a name may end in; ``.trace.json`` is looked for before ``.json``."""


def check_target(path: Path) -> str:
    """The suffix of a file that can be written.

    Raises:
        ConfigError: an unknown suffix, a folder that is not there or not writable, or a folder of that name.
    """
    suffix = next((each for each in SUFFIXES if path.name.lower().endswith(each)), None)
    if suffix is None:
        raise ConfigError(f"{path.name!r} does not say what to write: let it end in {', '.join(SUFFIXES)}")
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}; make it first")
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder; give the name of a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written: the folder {folder} is not writable; choose another")
    return suffix


def save(recording: Recording, path: str | Path, *, zoom: int | None = None) -> None:
    """Write a recording as what the path's suffix says.

    Args:
        recording: what to write.
        path: ends in ``.png``, ``.svg``, ``.trace.json`` or ``.json``.
        zoom: in a picture, number of the first step to show close up; ``None`` takes steps that stand for the run.

    Raises:
        ConfigError: as :func:`check_target`; or a picture of no steps, or of a ``zoom`` that is not recorded.
        OSError: the disk is full, or the like.
    """
    target = Path(path)
    suffix = check_target(target)
    if suffix == ".trace.json":
        write_whole(target, lambda part: _write_trace(recording, part))
    elif suffix == ".json":
        write_whole(target, lambda part: part.write_text(json.dumps(numbers_of(recording)) + "\n", encoding="utf-8"))
    else:
        # Not above: matplotlib takes half a second to load, and a program that draws nothing should not wait for it.
        from gapless.timeline.picture import draw_timeline, save_picture

        figure = draw_timeline(recording, zoom=zoom)
        write_whole(target, lambda part: save_picture(figure, part, "png" if suffix == ".png" else "svg"))


def _write_trace(recording: Recording, part: Path) -> None:
    with part.open("w", encoding="utf-8") as file:
        write_trace(recording, file)
