"""Starting an engine in sight of its user: stages, a bar for the weights, and what was decided."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from gapless.cli.console import say, stderr

__all__ = ["StartProgress", "started"]

_Served = TypeVar("_Served")


def started(
    make: Callable[..., _Served], model: str, *, options: Mapping[str, Any], given: Mapping[str, Any], quiet: bool
) -> _Served:
    """Make an ``LLM`` or an ``AsyncLLM`` and show how far it is.

    Args:
        make: the class.
        model: what the user wrote.
        options: of the engine.
        given: other keywords of the class.
        quiet: show nothing.
    """
    began_s = time.perf_counter()
    if quiet:
        return make(model, **given, **options)
    with StartProgress() as progress:
        served = make(model, progress=progress, **given, **options)
    say(f"{model} is ready after {time.perf_counter() - began_s:.1f} s (depth {options['depth']})", style="dim")
    return served


class _BytesColumn(DownloadColumn):
    """Bytes done, for the one stage that counts them."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


class StartProgress:
    """Shows the stages of loading: as bars on a terminal, as a line each elsewhere."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            _BytesColumn(),
            TimeElapsedColumn(),
            console=stderr,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if stderr.is_interactive:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if stderr.is_interactive:
            self._bars.stop()

    def stage(self, name: str) -> None:
        """A stage begins: the one before is complete."""
        if not stderr.is_interactive:
            say(f"{name} ...", style="dim")
            return
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=None)

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        """Bytes of the weights that are in the model."""
        if self._task is not None:
            self._bars.update(self._task, completed=bytes_done, total=bytes_total)
