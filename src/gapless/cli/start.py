"""Starting an engine in sight of its user: stages, a bar for the weights, and what was decided.

Most of a start is imports, which make hundreds of thousands of objects that live as long as the process. Python's
cycle collector would look through all of them again and again, so it stands still meanwhile, see
:func:`collector_paused`.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.progress import BarColumn, DownloadColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from gapless.cli.console import say, stderr
from gapless.cli.gpu_opening import open_gpu

__all__ = ["StartProgress", "collector_paused", "started"]

_Served = TypeVar("_Served")
_SHOWN_STAGE_S = 0.05


@contextmanager
def collector_paused() -> Iterator[None]:
    """Import and load in the block, and have the cycle collector never look at what that made.

    For the start of a process of ours. It takes half a second off (0.55 of 2.3 s of imports on a laptop), and leaves
    later full collections, which hold up the engine's thread, next to nothing to look through (220 ms before).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def started(
    load: Callable[[], Callable[..., _Served]],
    model: str,
    *,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    quiet: bool,
) -> _Served:
    """Make an ``LLM`` or an ``AsyncLLM`` and show how far it is.

    Args:
        load: gives the class; its import is the first stage.
        model: what the user wrote.
        options: of the engine.
        given: other keywords of the class.
        quiet: show nothing.
    """
    with collector_paused():
        if options["device"] != "cpu":
            open_gpu()
        if quiet:
            return _imported(load)(model, **given, **options)
        with StartProgress() as progress:
            progress.stage("import torch")
            served = _imported(load)(model, progress=progress, **given, **options)
    say(f"{model} is ready after {progress.times()} (depth {options['depth']})", style="dim")
    return served


def _imported(load: Callable[[], Callable[..., _Served]]) -> Callable[..., _Served]:
    made = load()
    # Modules stay: the collection at the end of the start need not search them for garbage (300 ms).
    gc.freeze()
    return made


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
        self._began_s: dict[str, float] = {}
        self._ended_s: float | None = None

    def __enter__(self) -> Self:
        if stderr.is_interactive:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = time.perf_counter()
        if stderr.is_interactive:
            self._bars.stop()

    def times(self) -> str:
        """How long it took in all, and each stage that took long enough to be felt, in seconds."""
        end_s = time.perf_counter() if self._ended_s is None else self._ended_s
        starts_s = list(self._began_s.values())
        spans_s = [after - before for before, after in pairwise([*starts_s, end_s])]
        stages = zip(self._began_s, spans_s, strict=True)
        felt = [f"{name} {span_s:.1f}" for name, span_s in stages if span_s >= _SHOWN_STAGE_S]
        return f"{sum(spans_s):.1f} s" + (f": {', '.join(felt)}" if felt else "")

    def stage(self, name: str) -> None:
        """A stage begins: the one before is complete."""
        self._began_s[name] = time.perf_counter()
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
