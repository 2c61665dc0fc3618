"""Faults in a real ``gapless serve``: :class:`Faults` makes its processes hold, fail or crawl at a named point.

A module that Python imports at its start (``sitecustomize``, found through ``PYTHONPATH``) wraps a few functions of the
processes. What they do then depends on files in a folder, so a test can let a fault begin in the midst of a run. It
makes "killed while it reads weights" mean that, however fast the machine is.
"""

from pathlib import Path
from typing import Final, Literal

from e2e.served_process import ENVIRONMENT
from fixtures.waiting import until

__all__ = ["ENGINE_POINTS", "SERVER_POINTS", "Fault", "Faults"]

Fault = Literal["crawl", "hang", "raise"]
SERVER_POINTS: Final = ("imports the server", "loads the tokenizer")
ENGINE_POINTS: Final = ("is born", "imports torch", "opens the checkpoint", "reads weights")

_CODE: Final = """
import pathlib, sys, time

FOLDER, POINT, SEND_TIMEOUT_S = pathlib.Path({folder!r}), {point!r}, {send_timeout_s!r}
MODULES = {{
    "imports the server": "gapless.server.serve",
    "is born": "gapless.server.lifecycle",
    "imports torch": "torch",
}}
STAGES = {{"opens the checkpoint": "open checkpoint", "reads weights": "read weights"}}


def hold():
    (FOLDER / "reached").touch()
    while not (FOLDER / "go").exists():
        time.sleep(0.005)


class HoldAtImport:
    def find_spec(self, name, path=None, target=None):
        if name == MODULES[POINT]:
            sys.meta_path.remove(self)
            hold()


def engine():
    from gapless.model.decoder import DecoderModel
    from gapless.server.outbox import Outbox

    forward, put = DecoderModel.forward, Outbox.put

    def faulty_forward(self, *arguments):
        if (FOLDER / "crawl").exists():
            time.sleep(0.25)
        if (FOLDER / "hang").exists():
            (FOLDER / "hangs").touch()
            time.sleep(3600)
        if (FOLDER / "raise").exists():
            raise ArithmeticError("a made-up fault in /some/path")
        return forward(self, *arguments)

    def faulty_put(self, message):
        if POINT in STAGES and getattr(message, "stage", None) == STAGES[POINT]:
            hold()
        put(self, message)

    DecoderModel.forward, Outbox.put = faulty_forward, faulty_put


def server():
    from gapless.server import engine_client, sse

    if SEND_TIMEOUT_S:
        sse.EventStreamResponse.__init__.__kwdefaults__["send_timeout_s"] = SEND_TIMEOUT_S
    load = engine_client._load_text

    def held_load(*arguments):
        hold()
        return load(*arguments)

    if POINT == "loads the tokenizer":
        engine_client._load_text = held_load


is_engine = "gapless.server.engine_process" in sys.orig_argv
if MODULES.get(POINT) and is_engine is (POINT != "imports the server"):
    sys.meta_path.insert(0, HoldAtImport())
elif is_engine:
    engine()
elif POINT == "loads the tokenizer" or SEND_TIMEOUT_S:
    server()
"""


class Faults:
    """What goes wrong in one server.

    Args:
        folder: of its own; empty.
        point: where a process holds until :meth:`go`.
        send_timeout_s: instead of the server's own.
    """

    def __init__(self, folder: Path, point: str | None = None, *, send_timeout_s: float | None = None) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        code = _CODE.format(folder=str(folder), point=point, send_timeout_s=send_timeout_s)
        (folder / "sitecustomize.py").write_text(code)
        self.environment = {"PYTHONPATH": f"{folder}:{ENVIRONMENT['PYTHONPATH']}"}

    def begin(self, fault: Fault) -> None:
        """From now on each step takes a quarter of a second, never ends, or raises."""
        (self._folder / fault).touch()

    def end(self, fault: Fault) -> None:
        """Steps are as fast as they can be again."""
        (self._folder / fault).unlink()

    def wait_until_it_hangs(self) -> None:
        """A step is in its forward pass, and stays there."""
        until((self._folder / "hangs").exists)

    def wait_until_it_holds(self) -> None:
        """The process is at its point."""
        until((self._folder / "reached").exists)

    def go(self) -> None:
        """Let it go on."""
        (self._folder / "go").touch()
