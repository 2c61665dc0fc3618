"""The engine process as the API process sees it: :class:`EngineChild` starts it and hears of its end.

The thread that makes one must live as long as the engine: the kernel ends the process with it (see
:mod:`gapless.server.lifecycle`).
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

from gapless.server.lifecycle import without_interrupts

__all__ = ["EngineChild", "describe_exit"]


class EngineChild:
    """A process that runs :mod:`gapless.server.engine_process`, and the lifeline it is tied to.

    Args:
        commands_address, news_address: what it is told of its parent's sockets; all else comes as messages.
        on_exit: called with the exit status, negative for a signal, in a thread of its own.
    """

    def __init__(self, commands_address: str, news_address: str, on_exit: Callable[[int], None]) -> None:
        self._lifeline, childs_end = socket.socketpair()
        command = [
            sys.executable,
            "-P",  # a folder called gapless where the server was started is not this package
            *("-m", "gapless.server.engine_process"),
            *(commands_address, news_address, str(os.getpid()), str(childs_end.fileno())),
        ]
        # Options come as a message, and keys are not the engine's business.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GAPLESS_")}
        with childs_end, without_interrupts():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,  # a library's chatter belongs into the log
                pass_fds=(childs_end.fileno(),),
                env=environment,
            )
        self._on_exit = on_exit
        threading.Thread(target=self._watch, name="gapless-engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, wherever it is; nothing if it has ended."""
        self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of the lifeline; the process ends if it has not yet."""
        self._lifeline.close()

    def _watch(self) -> None:
        self._on_exit(self._process.wait())


def describe_exit(status: int) -> str:
    """How a process with this exit status ended, to follow its name in a sentence."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
