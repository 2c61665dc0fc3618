"""``gapless serve`` as a benchmark runs it: started, asked for its figures, watched from outside, ended.

What a process holds is read from the system, not asked of the process: anonymous memory and swap together (a leak may
hide in either), resident memory, descriptors and threads. Nothing here imports torch, so that it starts at once.
"""

import asyncio
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from gapless.bench.serving.http_client import HttpClient, HttpError, Origin

SERVE = [sys.executable, "-c", "from gapless.cli.main import main; main()", "serve"]
_READY_WITHIN_S = 1200.0
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessUsage:
    """What one process holds: memory in MiB, and how many descriptors and threads."""

    anonymous_mib: float
    resident_mib: float
    descriptors: int
    threads: int


def usage_of(pid: int) -> ProcessUsage:
    """What a process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    sizes = {key: int(value) for key, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)}
    return ProcessUsage(
        anonymous_mib=(sizes["RssAnon"] + sizes["VmSwap"]) * 1024 / _MIB,
        resident_mib=sizes["VmRSS"] * 1024 / _MIB,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=sizes["Threads"],
    )


class ServerProcess:
    """A running server. A context manager, whose end kills what is left of it.

    Args:
        arguments: of ``gapless serve``, without a port.
        log: where standard error goes.
        threads: for the engine's computations; ``None`` leaves it to torch.
    """

    def __init__(self, arguments: Sequence[str], log: Path, *, threads: int | None = None) -> None:
        self.log = log
        self.port = _free_port()
        self.arguments = [*arguments, "--port", str(self.port)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GAPLESS_")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*SERVE, *self.arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def origin(self) -> Origin:
        """Where it listens."""
        return Origin.parse(f"http://127.0.0.1:{self.port}")

    @property
    def pids(self) -> dict[str, int]:
        """The ids of both processes, by name."""
        children = psutil.Process(self.process.pid).children()
        [engine] = [each.pid for each in children if "gapless.server.engine_process" in each.cmdline()]
        return {"api": self.process.pid, "engine": engine}

    async def wait_until_ready(self, timeout_s: float = _READY_WITHIN_S) -> None:
        """Wait until it takes requests."""
        deadline_s = time.monotonic() + timeout_s
        while not await self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the server did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            await asyncio.sleep(0.05)

    async def _is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                pass
            async with HttpClient(self.origin) as client, client.request("GET", "/ready") as response:
                await response.body()
                return response.status == 200
        except (OSError, HttpError):
            return False

    def end(self, timeout_s: float = 60.0) -> int:
        """Ask it to end, as an operator does, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


async def metrics_of(client: HttpClient) -> dict[str, float]:
    """All figures of ``/metrics`` by name and labels, without the prefix ``gapless_``."""
    async with client.request("GET", "/metrics") as response:
        text = (await response.body()).decode()
    lines = re.findall(r"^gapless_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def total(metrics: Mapping[str, float], name: str, labels: str = "") -> float:
    """The sum over all label values of a figure, or over those whose labels match an expression."""
    return sum(v for key, v in metrics.items() if key.partition("{")[0] == name and re.search(labels, key))


def raise_descriptor_limit(wanted: int) -> int:
    """Allow this process and its children so many open files, as far as the system lets it; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
