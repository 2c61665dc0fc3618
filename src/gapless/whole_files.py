"""Writing a file whole or not at all: :func:`write_whole`. Any thread may call it."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` make a file under another name, which then takes the place of an older one.

    If it fails, nothing is left of it, and the older file is as it was. What is no file (a pipe, ``/dev/null``) is
    written to as it is.

    Args:
        path: of the file.
        write: writes to the path that it is given.

    Raises:
        OSError: the disk is full, or the like; and what ``write`` raises.
    """
    if path.exists() and not path.is_file():
        write(path)
        return
    # A name of its own, so that threads and processes may write to one path at once.
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        write(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
