"""No engine process without its parent, and no socket folder left behind.

The engine process dies with its parent, however that ends and whatever the engine does at the time. Three means, since
each has a hole that another closes:

- ``PR_SET_PDEATHSIG``: the kernel kills the child when the thread that started it ends. It needs nothing of the child,
  so it works while the child holds the interpreter lock, hangs in a driver or loads a model. Not before it is set.
- the parent's id, compared right after: the parent had died before the signal was set.
- the *lifeline*, a socket pair whose other end only the parent has: a thread of the child reads it, and ends the
  process when it closes. It covers systems without that signal, and a parent that lives on and lets go.

``test_c66_no_engine_outlives_a_killed_parent`` kills parents at every phase. The engine process calls this in its main
thread, before it imports anything that takes time; :class:`SocketFolder` belongs to the API process.
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gapless.errors import ConfigError

__all__ = ["SocketFolder", "die_with_parent", "ignore_stop_signals", "without_interrupts"]

_PR_SET_PDEATHSIG = 1
_MAX_SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its end
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def die_with_parent(parent_pid: int, lifeline: int) -> None:
    """End this process as soon as its parent ends.

    Args:
        parent_pid: of the process that started this one.
        lifeline: the child's end of the socket pair, a file descriptor.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
    threading.Thread(target=_exit_at_end_of, args=(lifeline,), name="gapless-lifeline", daemon=True).start()


def ignore_stop_signals() -> None:
    """Leave Ctrl-C and SIGTERM to the parent.

    A terminal sends the first to the whole process group and a service manager the second to all processes of a
    service; the parent lets running requests end before it ends its engine.
    """
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Start a child in this block, and no signal reaches it until it calls :func:`ignore_stop_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class SocketFolder:
    """A new folder for unix sockets that only this user may enter."""

    def __init__(self) -> None:
        """Make the folder, below ``TMPDIR`` or, where that makes paths too long for a socket, below ``/tmp``.

        Raises:
            ConfigError: neither can be used.
        """
        self.path = _make_folder()

    def address(self, name: str) -> str:
        """The ZeroMQ address of the socket ``name`` in it."""
        return f"ipc://{self.path / name}"

    def remove(self) -> None:
        """Remove the folder; a second call is nothing. Connected sockets stay connected."""
        shutil.rmtree(self.path, ignore_errors=True)


def _make_folder() -> Path:
    why = ""
    for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        if len(os.fsencode(parent)) + len("/gapless-12345678/commands") > _MAX_SOCKET_PATH_BYTES:
            why = f"{parent} makes paths longer than the {_MAX_SOCKET_PATH_BYTES} bytes that a unix socket's may have"
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="gapless-", dir=parent))
        except OSError as error:
            why = f"no folder can be made in {parent}: {error.strerror}"
    raise ConfigError(f"no place for unix sockets: {why}; set TMPDIR to a short path that can be written to")


def _exit_at_end_of(lifeline: int) -> None:
    try:
        while os.read(lifeline, 1):
            pass
    finally:
        os._exit(1)
