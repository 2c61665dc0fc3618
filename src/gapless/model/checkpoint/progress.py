"""How far loading has come, told by whoever does the work to whoever shows it: :class:`Progress`."""

from typing import Literal, Protocol

__all__ = ["LoadStage", "NoProgress", "Progress"]

LoadStage = Literal[
    "find model",
    "download",
    "open checkpoint",
    "allocate model",
    "read weights",
    "draw random weights",
    "compile kernels",
    "allocate KV cache",
    "warm up",
    "capture graphs",
    "load tokenizer",
]
"""The stages in their order; a model on this machine has no ``find model``, a cached one no ``download``."""


class Progress(Protocol):
    """Is told how far loading has come, on the thread that loads."""

    def stage(self, name: LoadStage) -> None:
        """A stage begins, and the one before it has ended."""
        ...

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        """Within ``download`` and ``read weights``: bytes of the files that have arrived by now, and bytes in all."""
        ...


class NoProgress:
    """Progress that nobody watches."""

    def stage(self, name: LoadStage) -> None:
        """Do nothing."""

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        """Do nothing."""
