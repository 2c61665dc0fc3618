"""The words between the API process and the engine process, as msgspec structs in MessagePack.

Commands go to the engine, news come from it. Every message is decoded into one of these types or not at all: nothing
that arrives can name code or an object. What a step tells of most requests, one token each, travels as two packed
arrays; the rest as a :class:`ChoiceNews` for each choice. Immutable values: any thread may make and read them.
"""

from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from gapless.config import EngineConfig
from gapless.model.loading import LoadStage
from gapless.outputs import FinishReason
from gapless.sampling_params import SamplingParams

__all__ = [
    "Abort",
    "Accepted",
    "ChoiceNews",
    "Command",
    "CountersReply",
    "Died",
    "EngineStats",
    "Failed",
    "FailureKind",
    "GetCounters",
    "LoadProgress",
    "LogLine",
    "News",
    "RatedToken",
    "Ready",
    "RefusalKind",
    "Refused",
    "Shutdown",
    "StartEngine",
    "StepNews",
    "Submit",
    "TimelineStats",
    "WireParams",
    "WireTokenizerSource",
]

FailureKind: TypeAlias = Literal["config", "unsupported", "checkpoint", "other"]
RefusalKind: TypeAlias = Literal["request", "too_long", "queue_full", "dead"]
_Id: TypeAlias = Annotated[int, Meta(ge=0)]
_MOST: Final = 2**31 - 1  # more than any context or vocabulary has; a message has no larger integers than 64 bits


# --- commands -----------------------------------------------------------------------------------------------------


class StartEngine(Struct, frozen=True, kw_only=True, tag="start"):
    """The first command, once: which model to load, and how.

    Attributes:
        model: what the user wrote.
        is_path: it is a path and never a name.
        config: the engine's options.
        log_level: what the API process logs, as :mod:`logging` counts.
    """

    model: str
    is_path: bool
    config: EngineConfig
    log_level: int


class WireParams(Struct, frozen=True, kw_only=True):
    """The part of :class:`~gapless.SamplingParams` that concerns tokens; what concerns text stays where text is made.

    Bad words are ids already and go beside it.
    """

    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None

    @classmethod
    def of(cls, params: SamplingParams) -> "WireParams":
        """Take the fields over as plain numbers: defaults are marked by subclasses, which no encoder knows."""
        allowed, bias = params.allowed_token_ids, params.logit_bias
        return cls(
            n=params.n,
            temperature=float(params.temperature),
            top_k=min(int(params.top_k), _MOST),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=None if bias is None else {token: float(value) for token, value in bias.items()},
            allowed_token_ids=None if allowed is None else list(allowed),
            seed=params.seed,
            max_tokens=None if params.max_tokens is None else min(int(params.max_tokens), _MOST),
            min_tokens=min(params.min_tokens, _MOST),
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )

    def params(self) -> SamplingParams:
        """The parameters again, checked as everywhere.

        Raises:
            RequestError: a value is impossible.
        """
        return SamplingParams(**msgspec.structs.asdict(self))


class Submit(Struct, frozen=True, kw_only=True, tag="submit"):
    """Run a prompt; answered by :class:`Accepted` or :class:`Refused`, before any news of its choices.

    Attributes:
        call: the sender's number for this request.
        prompt: ids, packed by :func:`~gapless.server.encoding.packed_ids`.
        stop_token_ids: ids that end it, EOS among them unless it is ignored.
        bad_words: as ids.
        salt: becomes part of every prefix-cache key.
    """

    call: _Id
    prompt: bytes
    params: WireParams
    stop_token_ids: list[int]
    bad_words: list[list[int]]
    salt: bytes


class Abort(Struct, frozen=True, kw_only=True, tag="abort"):
    """End choices; ended or unknown ones are nothing."""

    choice_ids: list[_Id]


class GetCounters(Struct, frozen=True, kw_only=True, tag="counters"):
    """Asks for a :class:`CountersReply` of the same ``call``."""

    call: _Id


class Shutdown(Struct, frozen=True, kw_only=True, tag="shutdown"):
    """Abort what runs, tell of it, and exit."""


Command: TypeAlias = StartEngine | Submit | Abort | GetCounters | Shutdown


# --- news ---------------------------------------------------------------------------------------------------------


class LoadProgress(Struct, frozen=True, kw_only=True, tag="loading"):
    """How far loading has come.

    Attributes:
        stage: set when a stage begins.
        bytes_done, bytes_total: within ``read weights``.
    """

    stage: LoadStage | None
    bytes_done: int = 0
    bytes_total: int = 0


class WireTokenizerSource(Struct, frozen=True, kw_only=True):
    """:class:`~gapless.model.checkpoint.TokenizerSource` with its path as text."""

    kind: Literal["folder", "gguf", "bytes"]
    path: str | None
    eos_token_id: int | None


class Ready(Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine runs; what the text side has to know about it.

    Attributes:
        generation_config: the raw ``generation_config.json``.
        device, dtype: as torch names them.
        start_s: seconds that loading took.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity: int
    max_waiting: int
    eos_token_ids: list[int]
    generation_config: dict[str, Any]
    tokenizer_source: WireTokenizerSource
    device: str
    dtype: str
    start_s: float


class Failed(Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine could not be started, for a reason that is the user's (``config``, ``checkpoint``) or not."""

    kind: FailureKind
    message: str


class Accepted(Struct, frozen=True, kw_only=True, tag="accepted"):
    """A request is queued; one id for each choice."""

    call: _Id
    choice_ids: list[_Id]


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """A request is not queued."""

    call: _Id
    kind: RefusalKind
    message: str


class RatedToken(Struct, frozen=True, array_like=True):
    """A token's log-prob and rank, and the most likely tokens at its place: int32 ids and fp32 log-probs, packed."""

    logprob: float
    rank: int
    top_ids: bytes
    top_logprobs: bytes


class ChoiceNews(Struct, frozen=True, array_like=True):
    """News of one choice, as :class:`~gapless.engine.results.RequestUpdate` has them.

    Attributes:
        token_ids: packed by :func:`~gapless.server.encoding.packed_ids`.
        queue_s: seconds from its arrival until its first step was planned.
    """

    choice_id: _Id
    token_ids: bytes
    finish_reason: FinishReason | None
    stop_reason: int | None
    error: str | None
    num_cached_tokens: int
    num_preemptions: int
    logprobs: list[RatedToken] | None
    prompt_logprobs: list[RatedToken | None] | None
    queue_s: float | None = None


class StepNews(Struct, frozen=True, kw_only=True, tag="step"):
    """News of a step, or of several that the receiver was too slow for, merged by choice.

    Attributes:
        choice_ids: choices with one token and no other news: int64, packed.
        tokens: the token of each, packed by :func:`~gapless.server.encoding.packed_ids`.
        others: the rest.
    """

    choice_ids: bytes
    tokens: bytes
    others: list[ChoiceNews]


class TimelineStats(Struct, frozen=True, kw_only=True):
    """Sums over the engine's life, out of its timeline; times in seconds.

    ``busy_s`` and all of ``idle_s`` add up to ``window_s``. Only steps without prefill count as decode steps; what
    they read over ``read_bytes_per_s`` is the least time they could have taken.

    Attributes:
        num_steps: steps that were counted.
        busy_s: the device computed.
        window_s: there was work.
        no_work_s: there was none, between steps.
        idle_s: by cause, as :class:`~gapless.timeline.idle.IdleCause` names them in lower case, without ``no_work``.
        decode_read_bytes, decode_busy_s, decode_elapsed_s: see :class:`~gapless.timeline.roofline.Roofline`.
        read_bytes_per_s: of the device; ``None`` where it was not measured, as on a CPU.
    """

    num_steps: int
    busy_s: float
    window_s: float
    no_work_s: float
    idle_s: dict[str, float]
    decode_steps: int
    decode_read_bytes: int
    decode_busy_s: float
    decode_elapsed_s: float
    read_bytes_per_s: float | None


class EngineStats(Struct, frozen=True, kw_only=True):
    """A moment's counts of the engine, see :class:`~gapless.engine.engine.EngineCounters`; times in seconds.

    Attributes:
        num_malformed: messages that the engine process has ignored because they were none.
        timeline: ``None`` where it is off.
    """

    free_blocks: int
    cached_blocks: int
    used_blocks: int
    running: int
    waiting: int
    in_flight_tokens: int
    steps: int
    output_tokens: int
    preemptions: int
    aborted: int
    device_busy_s: float
    device_window_s: float
    num_malformed: int
    timeline: TimelineStats | None


class CountersReply(Struct, frozen=True, kw_only=True, tag="counted"):
    """Answers :class:`GetCounters`."""

    call: _Id
    stats: EngineStats


class LogLine(Struct, frozen=True, kw_only=True, tag="log"):
    """A line for the API process's log, so that a server has one log."""

    level: int
    text: str


class Died(Struct, frozen=True, kw_only=True, tag="died"):
    """The engine's loop ended in an error; the process ends as soon as this was read."""

    kind: Literal["error", "step_timeout"]
    message: str


News: TypeAlias = LoadProgress | Ready | Failed | Accepted | Refused | StepNews | CountersReply | LogLine | Died
