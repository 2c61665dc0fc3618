"""The ``gapless`` command: :func:`main`, and the commands it knows.

Results go to standard output and everything else to standard error, so that either can be redirected alone.
"""

import io
import sys
from typing import Annotated

import typer

import gapless
from gapless.cli.bench import bench
from gapless.cli.chat import chat
from gapless.cli.console import INTERRUPTED_EXIT_CODE
from gapless.cli.doctor import doctor
from gapless.cli.generate import generate
from gapless.cli.serve import GroupedCommand, serve
from gapless.cli.timeline import timeline

__all__ = ["app", "main"]

# The host thread and the workers of CPU streams hand the interpreter to each other many times a step. At Python's
# default of 5 ms next to nothing overlaps (7.3 instead of 4.9 ms a step for 3 ms of host and 4 ms of kernel).
_SWITCH_INTERVAL_S = 1e-4

app = typer.Typer(
    name="gapless",
    help="An LLM inference engine in which the accelerator never waits for the host.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gapless {gapless.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(generate)
app.command()(chat)
app.command(cls=GroupedCommand)(serve)
app.command()(doctor)
app.add_typer(bench)
app.command()(timeline)


def main() -> None:
    """Run the command that the arguments name."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal cannot show
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)
