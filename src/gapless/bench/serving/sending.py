"""One request sent and its stream read: :func:`send`, and the :class:`RequestRecord` of what came when.

Times are seconds of ``time.perf_counter()``, taken when bytes have been read from the connection and before anything is
made of them. Runs in the client's event loop.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gapless.bench.serving.event_stream import EventStream
from gapless.bench.serving.http_client import ConnectError, HttpClient, HttpError
from gapless.bench.serving.prompts import ServingRequest

__all__ = ["RequestRecord", "error_message", "send"]

_DONE = "[DONE]"
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """What happened to one request.

    Attributes:
        scheduled_s: when it should have been sent; latencies count from here, so that a client or server that cannot
            keep up shows in them.
        sent_s: when it was.
        text_s: when each event with text came.
        ended_s: when the stream, or the attempt, was over.
        prompt_tokens: as the server counted them; ``None`` if it did not say.
        output_tokens: as the server counted them, or else the number of events with text.
        failure: what kind of failure it was, such as ``HTTP 429``; ``None`` if the answer is complete.
        detail: the server's or the system's own words about the failure.
    """

    scheduled_s: float
    sent_s: float
    text_s: tuple[float, ...]
    ended_s: float
    prompt_tokens: int | None = None
    output_tokens: int = 0
    failure: str | None = None
    detail: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the whole answer came."""
        return self.failure is None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text, in seconds."""
        return self.text_s[0] - self.scheduled_s if self.text_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first, in seconds."""
        if self.output_tokens < 2 or len(self.text_s) < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Times between neighbouring events with text, in seconds."""
        return [later - earlier for earlier, later in pairwise(self.text_s)]

    @property
    def end_to_end_s(self) -> float:
        """From when it should have been sent to its end, in seconds."""
        return self.ended_s - self.scheduled_s


@dataclass(kw_only=True, slots=True)
class _Reading:
    """A stream as far as it has been read."""

    text_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    error: str | None = None

    def take(self, data: str, now_s: float) -> None:
        """Take the data of one event."""
        if data == _DONE:
            self.is_done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            self.error = f"an event that is no chunk: {data[:_SHOWN_CHARACTERS]}"
            return
        if chunk.get("error"):
            self.error = error_message(chunk)
        if isinstance(usage := chunk.get("usage"), dict):
            self.usage = usage
        choices = chunk.get("choices")
        if isinstance(choices, list) and any(map(_has_text, choices)):
            self.text_s.append(now_s)


@dataclass(frozen=True, slots=True)
class _Failure:
    kind: str
    detail: str


async def send(client: HttpClient, request: ServingRequest, *, scheduled_s: float, timeout_s: float) -> RequestRecord:
    """Send a request and read its answer to the end. Failures are part of the record; nothing is raised."""
    sent_s = time.perf_counter()
    reading = _Reading()
    try:
        async with asyncio.timeout(timeout_s):
            failure = await _read(client, request, reading)
    except TimeoutError:
        failure = _Failure("timeout", f"no complete answer within {timeout_s:g} s")
    except ConnectError as error:
        failure = _Failure("no connection", str(error))
    except HttpError as error:
        failure = _Failure("broken connection", str(error))
    prompt_tokens, output_tokens = (reading.usage.get(key) for key in ("prompt_tokens", "completion_tokens"))
    return RequestRecord(
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        text_s=tuple(reading.text_s),
        ended_s=time.perf_counter(),
        prompt_tokens=prompt_tokens if isinstance(prompt_tokens, int) else None,
        output_tokens=output_tokens if isinstance(output_tokens, int) else len(reading.text_s),
        failure=failure.kind if failure else None,
        detail=failure.detail if failure else "",
    )


async def _read(client: HttpClient, request: ServingRequest, reading: _Reading) -> _Failure | None:
    """Read the whole answer."""
    async with client.request("POST", request.path, request.body) as response:
        if response.status != 200:
            return _Failure(f"HTTP {response.status}", error_message(_json(await response.body())))
        events = EventStream()
        async for piece in response.pieces():
            now_s = time.perf_counter()
            for data in events.feed(piece):
                reading.take(data, now_s)
    if reading.error is not None:
        return _Failure("error event", reading.error)
    if not reading.is_done:
        return _Failure("incomplete stream", f"it ended without {_DONE}")
    return None


def error_message(answer: Any) -> str:
    """The server's words about an error, from a body or an event of OpenAI's form or any other."""
    found = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or json.dumps(found)
    return " ".join(str(found).split())[:_SHOWN_CHARACTERS]


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", errors="replace")


def _has_text(choice: Any) -> bool:
    """Whether a chunk's choice brings text: of an answer, of reasoning before it, or of a completion."""
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    return bool(choice.get("text"))
