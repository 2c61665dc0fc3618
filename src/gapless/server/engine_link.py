"""The API process's end of the engine process: :class:`EngineLink` starts it, talks to it, and hears of its death.

It belongs to the event loop in which it was started, and only that loop's thread may use it. Nothing polls: the loop
watches the socket of the news, and a thread sleeps until the process ends. When it does, for whatever reason, every
waiting caller gets :class:`EngineDeadError` with the cause, and every later one at once.
"""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import zmq
from msgspec.structs import replace

from gapless.errors import EngineDeadError, RequestError, StepTimeoutError
from gapless.model.loading import NoProgress, Progress
from gapless.server.encoding import (
    MAX_COMMAND_BYTES,
    MAX_NEWS_BYTES,
    NEWS_HIGH_WATER_MARK,
    MalformedMessageError,
    decode_news,
    encode,
    failure,
    refusal,
)
from gapless.server.engine_child import EngineChild, describe_exit
from gapless.server.lifecycle import SocketFolder
from gapless.server.messages import (
    Abort,
    Accepted,
    Command,
    CountersReply,
    Died,
    EngineStats,
    Failed,
    GetCounters,
    LoadProgress,
    LogLine,
    News,
    Ready,
    Refused,
    Shutdown,
    StartEngine,
    StepNews,
    Submit,
)
from gapless.server.received_news import ChoiceReceiver, step_updates

__all__ = ["EngineLink"]

_log = logging.getLogger("gapless")

# Messages read before other callbacks of the loop get their turn: a step of 256 tokens takes about a millisecond.
_MESSAGES_A_TURN = 8


class _Call:
    """A submit that waits for its answer. ``receivers`` is ``None`` when its caller has gone meanwhile."""

    def __init__(self, receivers: Sequence[ChoiceReceiver], answer: asyncio.Future[list[int]]) -> None:
        self.receivers: Sequence[ChoiceReceiver] | None = receivers
        self.answer = answer


class EngineLink:
    """An engine process; made in the event loop that it will belong to, and running after :meth:`start`.

    Attributes:
        died: set when the engine is gone; ``error`` says why.
        num_malformed: messages that were none and have been ignored.
    """

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.num_malformed = 0
        self._loop = asyncio.get_running_loop()
        self._error: EngineDeadError | None = None
        self._child: EngineChild | None = None
        self._exited = asyncio.Event()
        self._closing = False
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._vocab_size = 0
        self._progress: Progress = NoProgress()
        self._receivers: dict[int, ChoiceReceiver] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: dict[int, _Call] = {}
        self._questions: dict[int, asyncio.Future[EngineStats]] = {}
        self._numbers = itertools.count()
        self._folder = SocketFolder()
        self._context = zmq.Context()
        self._news = self._context.socket(zmq.PULL)
        self._news.set(zmq.MAXMSGSIZE, MAX_NEWS_BYTES)
        self._news.set(zmq.RCVHWM, NEWS_HIGH_WATER_MARK)
        self._news.bind(self.news_address)
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.set(zmq.SNDHWM, 0)
        self._commands.set(zmq.RECONNECT_IVL, 10)
        self._commands.connect(self._folder.address("commands"))

    @property
    def news_address(self) -> str:
        """Where this process listens; gone when the engine is connected."""
        return self._folder.address("news")

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return None if self._child is None else self._child.pid

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is gone."""
        return self._error

    @property
    def num_live(self) -> int:
        """Choices that have not ended."""
        return len(self._receivers)

    def check_alive(self) -> None:
        """Raise a fresh :class:`EngineDeadError` if the engine is gone or going."""
        if self._error is not None:
            raise _fresh(self._error)
        if self._closing:
            raise EngineDeadError("the engine was shut down")

    async def start(self, start: StartEngine, progress: Progress | None = None) -> Ready:
        """Start the process and wait until its engine runs.

        Args:
            start: what to load.
            progress: told about the stages of loading, in the event loop.

        Raises:
            ConfigError, CheckpointError: as :func:`gapless.engine.assembly.build_engine`.
            EngineDeadError: it ended otherwise.
        """
        self._progress = progress or NoProgress()
        # The descriptor tells of changes only: whoever it wakes must read until there is nothing left. On two cores a
        # message was here after 40 us; through a thread it took 50, through zmq.asyncio 55 and half as much CPU again.
        self._loop.add_reader(self._news.fileno(), self._receive)
        try:
            self._child = EngineChild(self._folder.address("commands"), self.news_address, self._exited_in_thread)
            self._send(start)
            return await self._ready
        except BaseException as error:
            await self.close(timeout_s=0)
            if isinstance(error, OSError):
                raise EngineDeadError(f"the engine process could not be started: {error.strerror}") from error
            raise

    async def submit(self, submit: Submit, receivers: Sequence[ChoiceReceiver]) -> None:
        """Queue a request; if this is cancelled it is aborted.

        Args:
            submit: its ``call`` is replaced.
            receivers: one for each choice; they learn their ids before this returns.

        Raises:
            RequestError: the engine refuses it (:class:`PromptTooLongError`, :class:`QueueFullError` among them).
            EngineDeadError: the engine is gone.
        """
        self.check_alive()
        number = next(self._numbers)
        data = encode(replace(submit, call=number))
        if len(data) > MAX_COMMAND_BYTES:
            raise RequestError(f"the request takes {len(data)} bytes; the limit is {MAX_COMMAND_BYTES}: shorten it")
        call = self._calls[number] = _Call(receivers, self._loop.create_future())
        self._commands.send(data)
        try:
            await call.answer
        except asyncio.CancelledError:
            call.receivers = None
            if call.answer.done() and not call.answer.cancelled() and call.answer.exception() is None:
                self.abort(call.answer.result())
            raise

    def abort(self, choice_ids: Iterable[int]) -> None:
        """End choices; their receivers hear nothing more. Ended or unknown ones are nothing."""
        known = [choice_id for choice_id in choice_ids if choice_id in self._receivers]
        for choice_id in known:
            self._forget(choice_id)
        if known:
            self._send(Abort(choice_ids=known))

    async def counters(self) -> EngineStats:
        """The engine's counts at this moment.

        Raises:
            EngineDeadError: the engine is gone.
        """
        self.check_alive()
        number = next(self._numbers)
        answer: asyncio.Future[EngineStats] = self._loop.create_future()
        self._questions[number] = answer
        self._send(GetCounters(call=number))
        try:
            return await answer
        finally:
            self._questions.pop(number, None)

    async def drain(self, timeout_s: float) -> None:
        """Wait until no choice is live; those that are after ``timeout_s`` end as aborted."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            if self._error is None:
                self._send(Abort(choice_ids=list(self._receivers)))
            await self._idle.wait()

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the process; what runs ends as aborted. A second call waits for the first.

        Args:
            timeout_s: how long the engine may take; then it is killed.
        """
        if not self._closing:
            self._closing = True
            if self._child is None:
                self._ready.cancel()
                self._end(EngineDeadError("the engine was never started"))
                self._let_go()
                return
            if self._error is None:
                self._send(Shutdown())
            try:
                async with asyncio.timeout(timeout_s):
                    await self._exited.wait()
            except TimeoutError:
                pass
            finally:  # also when this is cancelled: the second Ctrl-C
                if not self._exited.is_set():
                    self._child.kill()
        await self._exited.wait()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _exited_in_thread(self, status: int) -> None:
        try:
            self._loop.call_soon_threadsafe(self._on_exit, status)
        except RuntimeError:  # the loop was closed first, and with it everybody who waited
            return

    def _on_exit(self, status: int) -> None:
        while self._receive_some():
            pass
        if self._closing and status == 0:
            self._end(EngineDeadError("the engine was shut down"))
        elif self._error is None:  # else its last words said why
            error = EngineDeadError(f"the engine process {describe_exit(status)}")
            if not self._closing:
                _log.error("%s", error)
            self._end(error)
        self._let_go()

    def _end(self, error: EngineDeadError) -> None:
        """The engine is gone: tell everybody, once."""
        if self._error is not None:
            return
        self._error = error
        waiting: list[asyncio.Future[Any]] = [call.answer for call in self._calls.values()]
        waiting += [*self._questions.values(), self._ready]
        receivers = list(self._receivers.values())
        self._calls.clear()
        self._receivers.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(_fresh(error))
        for receiver in receivers:
            receiver.fail(error)
        self._idle.set()
        self.died.set()

    def _let_go(self) -> None:
        """Of sockets, folder and lifeline, as soon as the process has ended."""
        self._loop.remove_reader(self._news.fileno())
        if self._child is not None:
            self._child.close()
        self._context.destroy(linger=0)
        self._folder.remove()
        self._exited.set()

    # --- messages -----------------------------------------------------------------------------------------------------

    def _send(self, command: Command) -> None:
        self._commands.send(encode(command))

    def _receive(self) -> None:
        """Read what has come; the loop's other callbacks get a turn in between."""
        if self._exited.is_set():
            return
        more = True
        try:
            more = self._receive_some()
        finally:
            # After an error of the caller's progress as well: the descriptor would not wake us for what is left.
            if more:
                self._loop.call_soon(self._receive)

    def _receive_some(self) -> bool:
        """Read some messages and say whether there may be more."""
        for _ in range(_MESSAGES_A_TURN):
            try:
                data = self._news.recv(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                self._take(decode_news(data))
            except MalformedMessageError as error:
                self.num_malformed += 1
                _log.warning("the API process ignored a message: %s", error)
        return True

    def _take(self, news: News) -> None:
        match news:
            case StepNews():
                self._deliver(news)
            case Accepted(call=number, choice_ids=ids):
                self._accepted(number, ids)
            case Refused(call=number):
                call = self._calls.pop(number, None)
                if call is not None and not call.answer.done():
                    call.answer.set_exception(refusal(news))
            case CountersReply(call=number, stats=stats):
                question = self._questions.pop(number, None)
                if question is not None and not question.done():
                    question.set_result(stats)
            case LogLine(level=level, text=text):
                _log.log(level, "%s", text)
            case Died(kind=kind, message=message):
                self._end(StepTimeoutError(message) if kind == "step_timeout" else EngineDeadError(message))
                if self._child is not None:
                    self._child.kill()
            case _:
                self._take_while_starting(news)

    def _take_while_starting(self, news: Ready | Failed | LoadProgress) -> None:
        if self._ready.done():
            raise MalformedMessageError("news of a start that is over")
        # It has its options and we hear it: nobody needs the sockets' names any more, and a crash leaves none behind.
        self._folder.remove()
        match news:
            case Ready():
                self._vocab_size = news.vocab_size
                self._ready.set_result(news)
            case Failed():
                self._ready.set_exception(failure(news))
            case LoadProgress(stage=stage) if stage is not None:
                self._progress.stage(stage)
            case LoadProgress():
                self._progress.advance(news.bytes_done, news.bytes_total)

    def _accepted(self, number: int, ids: list[int]) -> None:
        call = self._calls.get(number)
        if call is None:
            raise MalformedMessageError("an answer to a call that nobody waits for")
        if call.receivers is None or call.answer.done():
            # Its caller has been cancelled; of the second kind is one that has not had its turn since.
            del self._calls[number]
            self._send(Abort(choice_ids=ids))
            return
        if len(ids) != len(call.receivers) or not self._receivers.keys().isdisjoint(ids):
            raise MalformedMessageError("the ids of other choices")
        del self._calls[number]
        for choice_id, receiver in zip(ids, call.receivers, strict=True):
            self._receivers[choice_id] = receiver
            receiver.accepted(choice_id)
        self._idle.clear()
        call.answer.set_result(ids)

    def _deliver(self, news: StepNews) -> None:
        receivers = self._receivers
        updates = step_updates(news, self._vocab_size)
        # A receiver that is not there has aborted its choice, whose last tokens were on their way.
        for choice_id, token in zip(updates.choice_ids, updates.tokens, strict=True):
            receiver = receivers.get(choice_id)
            if receiver is not None:
                receiver.add_token(token)
        for update in updates.others:
            receiver = receivers.get(update.choice_id)
            if receiver is None:
                continue
            if update.finish_reason is not None:
                self._forget(update.choice_id)
            receiver.add(update)

    def _forget(self, choice_id: int) -> None:
        del self._receivers[choice_id]
        if not self._receivers:
            self._idle.set()


def _fresh(error: EngineDeadError) -> EngineDeadError:
    """An exception of each waiter's own: tracebacks grow where one object is raised many times."""
    return type(error)(str(error))
