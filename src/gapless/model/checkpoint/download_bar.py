"""The bar of a download in a program that shows none of its own: bytes, speed and time left, on standard error.

It belongs to the thread that loads. The hub client has bars, too: several lines that stay, in files and pipes as well.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars

from gapless.model.checkpoint.base import ProgressCallback
from gapless.model.checkpoint.progress import NoProgress, Progress

__all__ = ["watched"]

_log = logging.getLogger("gapless")


@contextmanager
def watched(progress: Progress, title: str) -> Iterator[ProgressCallback]:
    """Who is to be told of the bytes of a download while the block runs.

    Args:
        progress: told if somebody watches it. If not, a terminal shows a bar, unless gapless's log was set to warnings
            and no more.
        title: of the bar.
    """
    console = Console(stderr=True)
    quiet = _log.level >= logging.WARNING
    if not isinstance(progress, NoProgress) or quiet or not console.is_interactive:
        yield progress.advance
        return
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task(escape(title), total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
