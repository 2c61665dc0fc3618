"""The progress bar of a blocking call: requests done and tokens a second, on standard error.

The bar belongs to the thread that waits. It looks at the engine's counters, so it costs the engine nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gapless.engine.engine import EngineCounters

__all__ = ["GenerationProgress"]

_INTERVAL_S = 0.1


class GenerationProgress:
    """What a waiting call shows; without a bar it shows nothing and never has to wake up.

    Attributes:
        interval_s: how often :meth:`update` should be called, in seconds; ``None`` for never.
    """

    def __init__(self, bar: Progress | None, *, total: int, counters: Callable[[], EngineCounters]) -> None:
        self.interval_s = None if bar is None else _INTERVAL_S
        self._bar = bar
        self._counters = counters
        if bar is not None:
            self._task = bar.add_task("generating", total=total, speed="")
            self._start_s = time.perf_counter()
            self._start_tokens = counters().output_tokens

    @classmethod
    @contextmanager
    def shown(
        cls, wanted: bool | None, *, total: int, counters: Callable[[], EngineCounters]
    ) -> Iterator["GenerationProgress"]:
        """Show a bar while the block runs, if it is wanted.

        Args:
            wanted: ``None`` for a bar where standard error is a terminal that can show one.
            total: number of requests.
            counters: of the engine.
        """
        console = Console(stderr=True)
        if not (console.is_interactive if wanted is None else wanted):
            yield cls(None, total=total, counters=counters)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
        )
        with Progress(*columns, console=console, transient=console.is_interactive) as bar:
            progress = cls(bar, total=total, counters=counters)
            yield progress
            progress.update(total)

    def update(self, num_done: int) -> None:
        """Show how many requests have ended, and the speed so far."""
        assert self._bar is not None
        tokens = self._counters().output_tokens - self._start_tokens
        speed = tokens / (time.perf_counter() - self._start_s)
        self._bar.update(self._task, completed=num_done, speed=f"{speed:,.0f} tokens/s")
