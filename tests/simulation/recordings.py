"""Graphs without a GPU: :class:`ClosureRecorder` keeps the closure that a CUDA graph would capture, and runs it again.

As with a graph, everything that Python decided while recording is fixed, and device memory is read anew each time.
"""

from collections.abc import Callable

from gapless.pipeline.graphs import Recording

__all__ = ["ClosureRecorder"]


class ClosureRecorder:
    """Makes recordings that need no device."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Keep ``work``; nothing runs yet."""
        return _Kept(work)


class _Kept:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work
