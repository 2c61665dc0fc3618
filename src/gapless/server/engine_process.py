"""The engine process: ``python -m gapless.server.engine_process``, started by the API process and by nobody else.

It first makes sure that it cannot outlive its parent and leaves the stop signals to it, which takes milliseconds; what
takes seconds (torch, the model) comes after. Its arguments name a folder and two numbers; options come as a message.
"""

import os
import sys
import traceback
from collections.abc import Sequence

from gapless.server.lifecycle import die_with_parent, ignore_stop_signals

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Serve an engine to the parent process until it says so, or ends.

    Args:
        arguments: the addresses of commands and news, the parent's process id, the file descriptor of the lifeline.

    Returns:
        The exit status: 0 after a shutdown that was asked for.
    """
    commands, news, parent_pid, lifeline = arguments
    ignore_stop_signals()
    die_with_parent(int(parent_pid), int(lifeline))
    # Not before: from here on a dead parent ends this process, in the midst of an import too.
    from gapless.server.engine_service import run_engine_service

    return run_engine_service(commands, news)


if __name__ == "__main__":
    status = 1
    try:
        status = main(sys.argv[1:])
    except BaseException:
        traceback.print_exc()
    finally:
        # Without Python's own end, which waits for threads and drivers that may hang.
        sys.stderr.flush()
        os._exit(status)
