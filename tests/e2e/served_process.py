"""``gapless serve`` as an operator runs it: a process, its log, and plain HTTP."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

# As a shell starts it: a runner in the background may hand down an ignored SIGINT, and Python would keep to that.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
GAPLESS = [sys.executable, "-c", INTERRUPTIBLE + "from gapless.cli.main import main; main()"]
TINY = ["tiny-llama", "--load-format", "dummy", "--device", "cpu", "--num-blocks", "256", "--port", "0"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GAPLESS_")},
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "OMP_NUM_THREADS": "1",
}


class Served:
    """A running ``gapless serve``; its log goes to a file."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*GAPLESS, "serve", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**ENVIRONMENT, **environment},
            )
        self.port = 0
        self.socket_path = arguments[arguments.index("--uds") + 1] if "--uds" in arguments else None

    @property
    def told(self) -> str:
        """The log so far."""
        return self.log.read_text("utf-8", errors="replace")

    def wait_for(self, words: str, timeout_s: float = 60.0) -> None:
        """Wait until the log has the words."""
        deadline_s = time.monotonic() + timeout_s
        while words not in self.told:
            assert self.process.poll() is None, f"it ended: {self.told[-2000:]}"
            assert time.monotonic() < deadline_s, f"{words!r} did not come: {self.told[-2000:]}"
            time.sleep(0.02)
        if not self.port and (found := re.search(r"http://[^ \"]*:(\d+)", self.told)):
            self.port = int(found[1])

    def wait_until_ready(self) -> None:
        """Wait until it takes requests."""
        self.wait_for("ready model=")

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        """A connection of one's own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        if self.socket_path is not None:
            connection.sock = self.dial(timeout_s)
        return connection

    def dial(self, timeout_s: float = 60.0) -> socket.socket:
        """A bare connection of one's own, by TCP or by the Unix socket that the server listens on."""
        if self.socket_path is None:
            return socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s)
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout_s)
        connection.connect(self.socket_path)
        return connection

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One request and its answer, JSON where it is JSON."""
        with closing(self.connect()) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json", **headers})
            with connection.getresponse() as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith("{") else text

    @contextmanager
    def stream(self, max_tokens: int, prompt: str = "hello") -> Iterator[http.client.HTTPResponse]:
        """A stream of that many tokens; its head has come."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        with closing(self.connect()) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                assert answer.status == 200, answer.read()
                yield answer

    def signal(self, number: int) -> None:
        """Send a signal to the process and to no other."""
        self.process.send_signal(number)

    def end(self, timeout_s: float = 30.0) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout_s)

    def family(self) -> list[psutil.Process]:
        """The process and its children."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def engine(self) -> psutil.Process:
        """The engine process."""
        [found] = [each for each in self.family() if "gapless.server.engine_process" in each.cmdline()]
        return found


@contextmanager
def served(log: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Served]:
    """Run ``gapless serve`` and kill what is left of it at the end."""
    process = Served(list(arguments), log, environment or {})
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.signal(signal.SIGKILL)
        process.process.wait(30)


def gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    """Whether all of them end in time; zombies have ended."""
    deadline_s = time.monotonic() + timeout_s
    while any(_runs(process) for process in processes):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
