"""Reads streams of completions, one after the other, and keeps when each event came, in a process of its own.

    python stream_reader.py PORT PROMPT MAX_TOKENS LEAST

A thread of the tests' process would wait for the interpreter's lock whenever a test makes or parses megabytes, and such
a wait looks like one of the server. Ends, in the middle of a stream, when its standard input does and LEAST streams are
over, however long the machine takes for them, and only then writes what it saw. Tests read through
:class:`StreamReader`. Only the standard library is used: the process is there in 50 ms.
"""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Self

__all__ = ["StreamReader", "StreamSeen", "assert_at_least_once"]


def assert_at_least_once(nothing_stood_still: Callable[[], bool], tries: int = 3) -> None:
    """Of a few tries one must show no halt: the machine's own hiccups rarely come each time, a server's do."""
    assert any(nothing_stood_still() for _ in range(tries))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSeen:
    """One stream: what it said, and when. Times in seconds of ``time.monotonic()``, which all processes share.

    Attributes:
        times_s: when it was asked for, and when each event came.
        is_whole: whether it ended by itself.
    """

    status: int
    text: str
    finish_reason: str | None
    times_s: list[float]
    is_whole: bool


class StreamReader:
    """Streams the same completion again and again while the context lasts; :attr:`streams` is known after it.

    The last stream may be cut short; ``least`` others are not.
    """

    def __init__(self, port: int, *, prompt: str, max_tokens: int, least: int = 0) -> None:
        self.streams: list[StreamSeen] = []
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(port), prompt, str(max_tokens), str(least)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "begun\n"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        told, _ = self._process.communicate(timeout=60)
        self.streams = [StreamSeen(**json.loads(line)) for line in told.splitlines()]

    def gaps_s(self, since_s: float, until_s: float) -> list[float]:
        """Seconds without an event, in order, as far as they lie between two moments.

        The wait for the first event of a stream is one of them.
        """
        times_s = [time_s for stream in self.streams for time_s in stream.times_s]
        return [
            min(after, until_s) - max(before, since_s)
            for before, after in pairwise(times_s)
            if after > since_s and before < until_s
        ]


def _main(port: int, prompt: str, max_tokens: int, least: int) -> None:
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    told = []
    while not ended.is_set() or len(told) <= least:
        times_s, lines = [time.monotonic()], []
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while line := answer.readline():
            if line != b"\n":
                times_s.append(time.monotonic())
                lines.append(line)
                if not told and len(lines) == 1:
                    print("begun", flush=True)
            if ended.is_set() and len(told) >= least:
                break
        told.append((answer.status, times_s, lines))
    connection.close()
    for status, times_s, lines in told:
        print(json.dumps(_seen(status, times_s, lines)))


def _seen(status: int, times_s: list[float], lines: list[bytes]) -> dict[str, object]:
    is_whole = lines[-1:] == [b"data: [DONE]\n"]
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in (lines[:-1] if is_whole else lines)]
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    return {
        "status": status,
        "text": "".join(choice["text"] for choice in choices),
        "finish_reason": choices[-1]["finish_reason"] if choices else None,
        "times_s": times_s,
        "is_whole": is_whole,
    }


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
