"""News on their way out of the engine process: :class:`Outbox`, the engine's sink.

The engine's thread only puts news down; a thread of the outbox encodes and sends them, one message for all that has
gathered. If the API process does not read, that thread waits in its send and the engine goes on: what gathers
meanwhile is merged by choice, so nothing is lost and memory is bounded by what was generated.
"""

import os
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence

import zmq

from gapless.engine.logprobs import FullLogprobs, TokenLogprobs
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError, StepTimeoutError
from gapless.server.encoding import encode, packed_choice_ids, packed_floats, packed_ids
from gapless.server.messages import ChoiceNews, Died, LogLine, News, RatedToken, StepNews

__all__ = ["Outbox"]

_MAX_WAITING_LOG_LINES = 1000
# A part of a step's news: far below the largest message, far above a usual step.
_PART_BYTES = 16 << 20


class Outbox:
    """Sends news through a socket. Any thread may put news; only the outbox's own thread touches the socket.

    Args:
        socket: connected; it belongs to the outbox from now on.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._wake = threading.Condition()
        self._messages: list[News] = []
        self._updates: dict[int, RequestUpdate] = {}
        self._died: Died | None = None
        self._closing = False
        self._packer = _StepPacker()
        self._thread = threading.Thread(target=self._run, name="gapless-outbox", daemon=True)
        self._thread.start()

    def put(self, message: News) -> None:
        """Send a message after those put before, and before the news of steps that are published later."""
        with self._wake:
            if isinstance(message, LogLine) and len(self._messages) >= _MAX_WAITING_LOG_LINES:
                return
            self._messages.append(message)
            self._wake.notify()

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Take the news of one step; called in the engine's thread and never waits for the socket."""
        with self._wake:
            waiting = self._updates
            for update in updates:
                earlier = waiting.get(update.request_id)
                waiting[update.request_id] = update if earlier is None else _merged(earlier, update)
            self._wake.notify()

    def engine_died(self, error: EngineDeadError) -> None:
        """Send the cause, after everything else."""
        with self._wake:
            is_timeout = isinstance(error, StepTimeoutError)
            self._died = Died(kind="step_timeout" if is_timeout else "error", message=str(error))
            self._wake.notify()

    def close(self, timeout_s: float) -> bool:
        """Send what is left and end the thread; false if nobody read it within ``timeout_s``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._send_all()
        except BaseException:
            # Callers must not wait for news that nobody sends: the API process hears of this process's end.
            traceback.print_exc()
            os._exit(1)

    def _send_all(self) -> None:
        while True:
            with self._wake:
                while not (self._messages or self._updates or self._died or self._closing):
                    self._wake.wait()
                messages, self._messages = self._messages, []
                updates, self._updates = self._updates, {}
                died, self._died = self._died, None
                closing = self._closing
            for message in messages:
                self._send(message)
            for part in self._packer.parts(updates.values()):
                self._send(part)
            if died is not None:
                self._send(died)
            if closing:
                # Handed to the socket's own thread so far; closing waits for the wire, as long as LINGER says.
                self._socket.close()
                return

    def _send(self, message: News) -> None:
        self._socket.send(encode(message))


class _StepPacker:
    """Turns updates into messages. Belongs to the outbox's thread."""

    def __init__(self) -> None:
        # What the other side knows of each live choice: how many prompt tokens came from the cache.
        self._known: dict[int, int] = {}

    def parts(self, updates: Iterable[RequestUpdate]) -> Iterator[StepNews]:
        ids: list[int] = []
        tokens: list[int] = []
        others: list[ChoiceNews] = []
        size = 0
        for update in updates:
            if (
                len(update.token_ids) == 1
                and update.finish_reason is None
                and update.logprobs is None
                and self._known.get(update.request_id) == update.num_cached_tokens
            ):
                ids.append(update.request_id)
                tokens.append(update.token_ids[0])
                continue
            others.append(self._choice_news(update))
            size += _size_of(others[-1])
            if size > _PART_BYTES:
                yield StepNews(choice_ids=b"", tokens=b"", others=others)
                others, size = [], 0
        if ids or others:
            yield StepNews(choice_ids=packed_choice_ids(ids), tokens=packed_ids(tokens), others=others)

    def _choice_news(self, update: RequestUpdate) -> ChoiceNews:
        is_first = update.request_id not in self._known
        if update.finish_reason is None:
            self._known[update.request_id] = update.num_cached_tokens
        else:
            self._known.pop(update.request_id, None)
        logprobs, prompt_logprobs = update.logprobs, update.prompt_logprobs
        stop_reason = update.stop_reason
        assert not isinstance(stop_reason, str), "stop strings are decided in the API process"
        return ChoiceNews(
            update.request_id,
            packed_ids(update.token_ids),
            update.finish_reason,
            stop_reason,
            update.error,
            update.num_cached_tokens,
            update.metrics.num_preemptions,
            None if logprobs is None else [_rated(each) for each in logprobs],
            # Updates repeat them; they are complete when the first token is there.
            [None if each is None else _rated(each) for each in prompt_logprobs]
            if prompt_logprobs is not None and is_first
            else None,
            update.metrics.queue_s,
        )


def _merged(earlier: RequestUpdate, later: RequestUpdate) -> RequestUpdate:
    """Both at once. The earlier one's lists grow in place: each update has lists of its own."""
    earlier.token_ids.extend(later.token_ids)
    logprobs = earlier.logprobs
    if logprobs is not None:
        logprobs.extend(later.logprobs or ())
    return later._replace(token_ids=earlier.token_ids, logprobs=logprobs)


def _rated(rated: TokenLogprobs | FullLogprobs) -> RatedToken:
    assert isinstance(rated, TokenLogprobs), "log-probs of the whole vocabulary are refused in the API process"
    return RatedToken(rated.logprob, rated.rank, packed_ids(rated.top_ids), packed_floats(rated.top_logprobs))


def _size_of(news: ChoiceNews) -> int:
    """About how many bytes it takes."""
    rated = [*(news.logprobs or ()), *(each for each in news.prompt_logprobs or () if each is not None)]
    return 64 + len(news.token_ids) + sum(24 + 2 * len(each.top_ids) for each in rated)
