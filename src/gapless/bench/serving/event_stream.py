"""Server-sent events: :class:`EventStream` turns bytes, however they are cut, into the data of whole events.

As WHATWG's HTML standard has it (section 9.2.6), except that event names and ids mean nothing here. One object a
stream, used by whoever reads it.
"""

import re

__all__ = ["EventStream"]

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStream:
    """What has come of a stream, and has not been given out yet."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Take the next bytes; returns the data of each event that they complete, in order."""
        *lines, self._rest = _LINE_END.split(self._rest + piece)
        if lines and not self._rest and piece.endswith(b"\r"):
            # The first half of a CRLF, perhaps: its line is taken when more is known.
            self._rest = lines.pop() + b"\r"
        events = []
        for line in lines:
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events

    def _take(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))
