"""The server's log: text or JSON lines on standard error, written by a thread of its own.

A log must not hold up a stream. Standard error may be a full disk, a closed pipe, or a pipe whose reader has stopped,
which blocks the writer for good; so whoever logs only puts a record into a bounded queue, and lines that do not fit
are counted and dropped. Control characters are escaped, and a value that could be read as another field stands in
quotes: a client can forge neither a line nor a part of one, nor command a terminal.

:func:`configure_logs` is called once, by the main thread; logging itself may be done by any thread.
"""

import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from gapless.server.settings import LogLevel

__all__ = ["LogWriter", "configure_logs", "escaped", "fields", "name_request", "request_fields"]

MAX_QUEUED_RECORDS: Final = 10_000
MAX_LINE_CHARACTERS: Final = 16_384
_FIELDS: Final = "gapless_fields"
_request_id: Final[ContextVar[str | None]] = ContextVar("request_id", default=None)
# A value of these alone ends where the next field begins.
_PLAIN_VALUE: Final = re.compile(r'[^\s"=\\]+')


def fields(**values: object) -> dict[str, Any]:
    """Data that belongs to a line: ``log.info("request", extra=fields(status=200))``."""
    return {_FIELDS: values}


def name_request(request_id: str) -> None:
    """Say which request the calling task answers; tasks that it starts from now on know it, too."""
    _request_id.set(request_id)


def request_fields() -> dict[str, Any]:
    """Data for a line about the request that is being answered: its id, by which the access log is searched."""
    request_id = _request_id.get()
    return {} if request_id is None else fields(request_id=request_id)


def escaped(text: str) -> str:
    """``text`` with everything that is not printable as an escape, line breaks included."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escape(c) for c in text)


def _field_value(value: object) -> str:
    """A field's value: in quotes, as a string of JSON, where spaces, quotes or ``=`` could pass for another field."""
    text = str(value)[:MAX_LINE_CHARACTERS]
    return escaped(text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text, ensure_ascii=False))


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class _Formatter(logging.Formatter):
    """One line for one record."""

    def __init__(self, *, json_lines: bool) -> None:
        super().__init__()
        self._json_lines = json_lines

    def format(self, record: logging.LogRecord) -> str:
        values: Mapping[str, Any] = getattr(record, _FIELDS, {})
        trace = self.formatException(record.exc_info) if record.exc_info else None
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        message = record.getMessage()[:MAX_LINE_CHARACTERS]
        if self._json_lines:
            line = {"time": moment, "level": record.levelname.lower(), "logger": record.name, "message": message}
            traced = {} if trace is None else {"trace": trace[-MAX_LINE_CHARACTERS:]}
            return json.dumps({**line, **values, **traced}, default=str)
        shown = "".join(f" {name}={_field_value(value)}" for name, value in values.items())
        # A trace keeps its lines, each marked, so that none of them looks like a line of the log.
        traced_lines = "" if trace is None else "".join(f"\n  | {escaped(line)}" for line in trace.splitlines())
        return f"{moment} {record.levelname:<7} {escaped(message)}{shown}{traced_lines}"


class LogWriter(logging.Handler):
    """Queues records; a thread formats them and writes them to a file descriptor.

    Args:
        descriptor: written to; never closed.
        json_lines: JSON objects instead of text.
    """

    def __init__(self, descriptor: int, *, json_lines: bool) -> None:
        super().__init__()
        self.setFormatter(_Formatter(json_lines=json_lines))
        self.num_dropped = 0
        self._descriptor = descriptor
        self._queue: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_QUEUED_RECORDS)
        self._thread = threading.Thread(target=self._write_all, name="gapless-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it when the queue is full."""
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def finish(self, timeout_s: float = 1.0) -> None:
        """Write what is queued, as far as it can be written in time."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                line = self.format(record)
            except Exception as error:  # a record that cannot be formatted must not end the log
                line = f"a log line of {record.name} could not be written: {type(error).__name__}"
            self._write(line.encode("utf-8", errors="backslashreplace") + b"\n")

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:  # disk full, or nobody reads: serving goes on
            self.num_dropped += 1


def configure_logs(*, level: LogLevel, json_lines: bool) -> LogWriter:
    """Send every log of this process to standard error and return the writer.

    Args:
        level: the least important lines that are written.
        json_lines: JSON objects instead of text.
    """
    writer = LogWriter(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, json_lines=json_lines)
    root = logging.getLogger()
    for log in (root, logging.getLogger("gapless")):
        for handler in list(log.handlers):
            log.removeHandler(handler)
    root.addHandler(writer)
    root.setLevel(logging.WARNING)
    logging.getLogger("gapless").setLevel(getattr(logging, level.upper()))
    logging.captureWarnings(True)
    # What uvicorn tells of each bad request is told by the access log, once.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    return writer
