"""What every command tells on standard error: the engine's log, and how it failed.

A failure is one line, the last one printed: the cause, with the remedy. Exit codes: 0 done, 1 failed, 2 wrong use,
130 interrupted (Ctrl-C), 141 the reader of standard output went away.
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from gapless.errors import GaplessError

__all__ = ["INTERRUPTED_EXIT_CODE", "UsageError", "reported", "say", "stderr"]

FAILED_EXIT_CODE = 1
USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130
BROKEN_PIPE_EXIT_CODE = 141

stderr = Console(stderr=True, highlight=False)
"""Everything that is not a result goes here."""


class UsageError(GaplessError):
    """The command was called in a wrong way."""


class _ConsoleHandler(logging.Handler):
    """Log lines above whatever progress is being shown."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), style="yellow" if record.levelno >= logging.WARNING else "dim")


def say(text: str, *, style: str = "") -> None:
    """Print a line to standard error, as it is: nothing in it is markup."""
    stderr.print(Text(text, style=style), soft_wrap=True)


@contextmanager
def reported(*, verbose: bool, quiet: bool = False) -> Iterator[None]:
    """Show the engine's log while the block runs, and end the program with one line if it fails.

    Args:
        verbose: show the traceback of a failure before that line, and the log's details.
        quiet: show warnings and failures only.
    """
    handler = _ConsoleHandler()
    log = logging.getLogger("gapless")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    try:
        yield
        sys.stdout.flush()
    except typer.Exit:
        raise
    except UsageError as error:
        _fail(error, USAGE_EXIT_CODE, verbose=verbose)
    except KeyboardInterrupt:
        say("interrupted")
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    except BrokenPipeError:
        # Python would flush standard output again at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE_EXIT_CODE) from None
    except Exception as error:
        _fail(error, FAILED_EXIT_CODE, verbose=verbose)
    finally:
        log.removeHandler(handler)


def _fail(error: Exception, code: int, *, verbose: bool) -> None:
    if verbose:
        traceback.print_exception(error)
    say(f"error: {_one_line(error)}", style="bold red")
    raise SystemExit(code) from None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, GaplessError):
        return text
    name = type(error).__name__
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return f"{name}: {text}; give less to the KV cache (--gpu-memory-utilization, --kv-cache-memory-bytes)"
    if isinstance(error, OSError):
        return text
    return f"{name}: {text} (--verbose shows where)"
