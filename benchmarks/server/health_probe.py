"""Asks ``/health`` again and again on one connection, in a process of its own, so that no other load delays it.

    python health_probe.py PORT INTERVAL_S

Writes a line for each answer: the status and the latency in milliseconds. Ends when its standard input does. A client
reads through :class:`HealthProbe`. Only the standard library is used: the process is there in 50 ms.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthAnswer:
    """One answer; the status is 0 where there was none."""

    status: int
    latency_ms: float


class HealthProbe:
    """Runs the probe while the context lasts; ``answers`` grows meanwhile."""

    def __init__(self, port: int, interval_s: float = 0.1) -> None:
        self.answers: list[HealthAnswer] = []
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(port), str(interval_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="health-probe", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            status, latency_ms = json.loads(line)
            self.answers.append(HealthAnswer(status=status, latency_ms=latency_ms))


def _ask(connection: http.client.HTTPConnection) -> int:
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        connection.close()
        return 0
    return answer.status


def _main(port: int, interval_s: float) -> None:
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not ended.is_set():
        began_s = time.perf_counter()
        status = _ask(connection)
        latency_ms = (time.perf_counter() - began_s) * 1e3
        print(json.dumps([status, round(latency_ms, 2)]), flush=True)
        ended.wait(interval_s)


if __name__ == "__main__":
    _main(int(sys.argv[1]), float(sys.argv[2]))
