"""What the engine process does: :func:`run_engine_service` builds an engine and obeys commands.

The main thread waits for commands and hands them to the engine, whose thread hands its news to the outbox. A message
that is none is counted, logged without its content, and ignored.
"""

import gc
import logging
import sys
import time
from pathlib import Path

import zmq

from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.engine import Engine
from gapless.engine.request import EngineRequest
from gapless.errors import EngineDeadError, GaplessError, RequestError
from gapless.model.loading import LoadStage
from gapless.server.encoding import (
    MAX_COMMAND_BYTES,
    NEWS_HIGH_WATER_MARK,
    MalformedMessageError,
    decode_command,
    failure_of,
    refusal_of,
    unpacked_ids,
)
from gapless.server.messages import (
    Abort,
    Accepted,
    Command,
    CountersReply,
    EngineStats,
    GetCounters,
    LoadProgress,
    LogLine,
    Ready,
    Refused,
    Shutdown,
    StartEngine,
    Submit,
    TimelineStats,
    WireTokenizerSource,
)
from gapless.server.outbox import Outbox
from gapless.timeline.recorder import TimelineTotals

__all__ = ["run_engine_service"]

_log = logging.getLogger("gapless")

_PROGRESS_INTERVAL_S = 0.05
_FLUSH_S = 2.0


def run_engine_service(commands_address: str, news_address: str) -> int:
    """Wait for the options, build the engine, and serve it until a shutdown.

    Args:
        commands_address: where this process listens.
        news_address: where the API process does.

    Returns:
        The exit status.
    """
    # Engine thread, outbox and main thread share this interpreter: at Python's default interval each could hold up
    # the others for 5 ms.
    sys.setswitchinterval(1e-4)
    context = zmq.Context()
    news = context.socket(zmq.PUSH)
    news.set(zmq.SNDHWM, NEWS_HIGH_WATER_MARK)
    news.set(zmq.LINGER, int(1000 * _FLUSH_S))
    news.connect(news_address)
    outbox = Outbox(news)
    inbox = _Inbox(context, commands_address)
    status = _serve(inbox, outbox)
    inbox.close()
    if outbox.close(_FLUSH_S):
        context.term()  # waits until what was sent is on the wire
    return status


def _serve(inbox: "_Inbox", outbox: Outbox) -> int:
    start = inbox.next()
    while not isinstance(start, StartEngine):
        if isinstance(start, Shutdown):
            return 0
        inbox.refuse("a command came before the options")
        start = inbox.next()
    _log_into(outbox, start.log_level)
    try:
        built = _build(start, outbox)
    except Exception as error:
        if not isinstance(error, GaplessError):
            _log.exception("the engine could not be built")
        outbox.put(failure_of(error))
        return 1
    outbox.put(_ready(built, start))
    _Service(built.engine, outbox, inbox).run()
    return 0


class _Inbox:
    """Commands as they come. Main thread only."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.num_malformed = 0
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.MAXMSGSIZE, MAX_COMMAND_BYTES)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)

    def next(self) -> Command:
        """Wait for the next command; whatever else comes is counted and ignored."""
        while True:
            try:
                return decode_command(self._socket.recv())
            except MalformedMessageError as error:
                self.refuse(str(error))

    def refuse(self, why: str) -> None:
        """Count a message that cannot be obeyed."""
        self.num_malformed += 1
        _log.warning("the engine process ignored a message: %s", why)

    def close(self) -> None:
        self._socket.close()


class _Service:
    """Obeys commands. Main thread only."""

    def __init__(self, engine: Engine, outbox: Outbox, inbox: _Inbox) -> None:
        self._engine = engine
        self._outbox = outbox
        self._inbox = inbox

    def run(self) -> None:
        """Until a shutdown was asked for and the engine has ended."""
        while True:
            match self._inbox.next():
                case Submit() as submit:
                    self._submit(submit)
                case Abort(choice_ids=ids):
                    self._engine.abort(ids)
                case GetCounters(call=call):
                    self._outbox.put(CountersReply(call=call, stats=self._stats()))
                case Shutdown():
                    self._engine.shutdown()
                    return
                case StartEngine():
                    self._inbox.refuse("a second set of options")

    def _submit(self, submit: Submit) -> None:
        try:
            request = self._request(submit)
            self._engine.submit([request], lambda ids: self._outbox.put(Accepted(call=submit.call, choice_ids=ids)))
        except MalformedMessageError as error:
            self._inbox.refuse(str(error))
            self._outbox.put(Refused(call=submit.call, kind="request", message="the request was damaged on its way"))
        except (RequestError, EngineDeadError) as error:
            self._outbox.put(refusal_of(submit.call, error))

    def _request(self, submit: Submit) -> EngineRequest:
        vocab_size, params = self._engine.limits.vocab_size, submit.params.params()
        params.check_vocabulary(vocab_size)
        for ids in (submit.stop_token_ids, *submit.bad_words):
            if not all(0 <= token < vocab_size for token in ids):
                raise MalformedMessageError("a token id outside the vocabulary")
        return EngineRequest(
            prompt_token_ids=unpacked_ids(submit.prompt),
            params=params,
            stop_token_ids=frozenset(submit.stop_token_ids),
            streams=True,
            bad_words=submit.bad_words,
            salt=submit.salt,
        )

    def _stats(self) -> EngineStats:
        counters = self._engine.counters()
        timeline = self._engine.timeline
        return EngineStats(
            free_blocks=counters.free_blocks,
            cached_blocks=counters.cached_blocks,
            used_blocks=counters.used_blocks,
            running=counters.running,
            waiting=counters.waiting,
            in_flight_tokens=counters.in_flight_tokens,
            steps=counters.steps,
            output_tokens=counters.output_tokens,
            preemptions=counters.preemptions,
            aborted=counters.aborted,
            device_busy_s=counters.device.busy_s,
            device_window_s=counters.device.window_s,
            num_malformed=self._inbox.num_malformed,
            timeline=None if timeline is None else _timeline_stats(timeline.totals()),
        )


class _Progress:
    """Tells the API process how far loading is, not more often than anybody looks."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._told_s = 0.0

    def stage(self, name: LoadStage) -> None:
        self._outbox.put(LoadProgress(stage=name))

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _PROGRESS_INTERVAL_S or bytes_done >= bytes_total:
            self._told_s = now_s
            self._outbox.put(LoadProgress(stage=None, bytes_done=bytes_done, bytes_total=bytes_total))


class _ForwardingHandler(logging.Handler):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.put(LogLine(level=record.levelno, text=self.format(record)))


def _log_into(outbox: Outbox, level: int) -> None:
    _log.addHandler(_ForwardingHandler(outbox))
    _log.setLevel(level)
    _log.propagate = False


def _build(start: StartEngine, outbox: Outbox) -> BuiltEngine:
    model = Path(start.model) if start.is_path else start.model
    built = build_engine(model, start.config, outbox, progress=_Progress(outbox))
    if built.engine.timeline is not None and built.loaded.model.device.type == "cuda":
        try:  # now, while nothing runs
            built.engine.timeline.measure_read_bandwidth()
        except GaplessError as error:
            _log.info("no share of the roofline will be told: %s", error)
    # What loading made lives as long as the process: the collector need not walk it again between two steps.
    gc.collect()
    gc.freeze()
    return built


def _timeline_stats(totals: TimelineTotals) -> TimelineStats:
    idle, roofline = totals.idle, totals.roofline
    return TimelineStats(
        num_steps=idle.num_steps,
        busy_s=idle.busy_s,
        window_s=idle.window_s,
        no_work_s=idle.no_work_s,
        idle_s={cause.name.lower(): seconds for cause, seconds in idle.idle_s.items()},
        decode_steps=roofline.decode_steps,
        decode_read_bytes=roofline.read_bytes,
        decode_busy_s=roofline.busy_s,
        decode_elapsed_s=roofline.elapsed_s,
        read_bytes_per_s=roofline.read_bytes_per_s,
    )


def _ready(built: BuiltEngine, start: StartEngine) -> Ready:
    loaded = built.loaded
    source = loaded.tokenizer_source
    return Ready(
        vocab_size=loaded.spec.vocab_size,
        max_model_len=built.max_model_len,
        kv_capacity=built.kv_capacity,
        max_waiting=start.config.max_waiting,
        eos_token_ids=sorted(loaded.eos_token_ids),
        generation_config=loaded.generation_config,
        tokenizer_source=WireTokenizerSource(
            kind=source.kind,
            path=None if source.path is None else str(source.path),
            eos_token_id=source.eos_token_id,
        ),
        device=str(loaded.model.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        start_s=built.start_s,
    )
