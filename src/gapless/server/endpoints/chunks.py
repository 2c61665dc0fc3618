"""The frame that is the same in every chunk of a stream, encoded once: :class:`ChunkFrame`.

A busy server writes tens of thousands of chunks a second; what each of them costs is one small piece of JSON between
bytes that are there already. Belongs to one stream.
"""

import time
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec

import gapless
from gapless.server.endpoints.answering import Answer
from gapless.server.error_bodies import api_error_of, error_content
from gapless.server.protocol.chat import StreamOptions
from gapless.server.sse import DONE, event

__all__ = ["FINGERPRINT", "ChunkFrame", "Heading", "json_bytes", "with_errors"]

FINGERPRINT: Final = f"gapless-{gapless.__version__}"
_encoder = msgspec.json.Encoder()


def json_bytes(value: Any) -> bytes:
    """A value as JSON."""
    return _encoder.encode(value)


class Heading:
    """What all parts of one answer say alike.

    Args:
        answer_id: ``chatcmpl-...`` or ``cmpl-...``.
        model: the name that the client used.
    """

    def __init__(self, answer_id: str, model: str) -> None:
        self.id = answer_id
        self.model = model
        self.created = int(time.time())

    def fields(self, kind: str) -> dict[str, Any]:
        """The first members of an answer of a kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }


class ChunkFrame:
    """Writes the chunks of one stream.

    Args:
        heading: of the answer.
        kind: ``object`` of a chunk.
        options: of the request.
        answer: whose usage is told.
    """

    def __init__(self, heading: Heading, kind: str, options: StreamOptions | None, answer: Answer) -> None:
        self.has_usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._answer = answer
        self._head = b"data: " + json_bytes(heading.fields(kind))[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.has_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """An event with one choice, which is JSON already."""
        return self._head + choice + (self._tail_with_usage() if self._continuous else self._tail)

    def usage_chunk(self) -> bytes:
        """The event before the last one, if it was asked for."""
        return self._head + self._tail_with_usage() if self.has_usage else b""

    def _tail_with_usage(self) -> bytes:
        return b'],"usage":' + json_bytes(self._answer.usage()) + b"}\n\n"


async def with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events of a chat or completion, and an error as one of them: the status has been sent."""
    try:
        async for each in events:
            yield each
    except Exception as error:
        yield event(error_content(api_error_of(error))) + DONE
    finally:
        await events.aclose()
