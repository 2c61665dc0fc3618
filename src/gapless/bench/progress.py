"""How far a benchmark has come: :class:`BenchProgress`, a bar on a terminal and nothing elsewhere.

The log has a line for each run that is done, so a run in a pipe is not silent. Used by the thread that measures; it
looks a few times a second, so it costs the engine nothing.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["BenchProgress"]


class BenchProgress:
    """Shows what is being measured, on standard error.

    Args:
        console: where to; a bar is shown only if it is a terminal.
        quiet: show nothing.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self._console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._shown = self._console.is_interactive and not quiet
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """Something else begins; how long it takes is not known yet."""
        self._bar.reset(self._task, description=name, total=None)

    @property
    def share_callback(self) -> Callable[[float], None] | None:
        """What to tell the share of the stage that is done, 0 to 1; ``None`` where nobody sees it."""
        return self._share if self._shown else None

    def _share(self, done: float) -> None:
        self._bar.update(self._task, total=1.0, completed=done)
