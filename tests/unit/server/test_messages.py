"""Messages between the processes: nothing is lost on the way, and whatever is none is refused as such."""

import dataclasses
import random
from itertools import product
from typing import Any

import msgspec
import pytest

from gapless import EngineConfig, SamplingParams
from gapless.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    UnsupportedModelError,
)
from gapless.sampling_params import unchosen
from gapless.server.encoding import (
    MalformedMessageError,
    decode_command,
    decode_news,
    encode,
    failure,
    failure_of,
    packed_choice_ids,
    packed_floats,
    packed_ids,
    refusal,
    refusal_of,
    unpacked_choice_ids,
    unpacked_floats,
    unpacked_ids,
)
from gapless.server.messages import (
    Abort,
    Accepted,
    ChoiceNews,
    Died,
    GetCounters,
    LoadProgress,
    RatedToken,
    Shutdown,
    StartEngine,
    StepNews,
    Submit,
    WireParams,
)
from gapless.server.received_news import step_updates

# What stays where text is made, and bad words, which cross as ids.
TEXT_FIELDS = {"bad_words", "stop", "include_stop_str_in_output", "skip_special_tokens", "detokenize"}

PARAMS = SamplingParams(
    n=3,
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    logit_bias={5: 2, 7: -100.0},
    allowed_token_ids=[1, 2, 3],
    seed=-(2**63),
    max_tokens=9,
    min_tokens=4,
    stop_token_ids=[8, 9],
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
)
SUBMIT = Submit(
    call=1,
    prompt=packed_ids([1, 2, 3]),
    params=WireParams.of(PARAMS),
    stop_token_ids=[8, 9],
    bad_words=[[4], [5, 6]],
    salt=b"\x00salt",
)
COMMANDS = [
    StartEngine(model="m", is_path=True, config=EngineConfig(depth=3, max_model_len=100), log_level=20),
    SUBMIT,
    Abort(choice_ids=[1, 2**40]),
    GetCounters(call=7),
    Shutdown(),
]
STEP = StepNews(
    choice_ids=packed_choice_ids([3, 2**40]),
    tokens=packed_ids([5, 6]),
    others=[
        ChoiceNews(4, packed_ids([7, 8]), "stop", 8, None, 16, 1, [RatedToken(-0.5, 1, b"", b"")] * 2, [None]),
    ],
)
NEWS = [
    STEP,
    Accepted(call=1, choice_ids=[0, 1]),
    LoadProgress(stage="open checkpoint"),
    Died(kind="error", message="m"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_commands_arrive_as_they_were_sent(command: Any) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("news", NEWS, ids=lambda news: type(news).__name__)
def test_news_arrive_as_they_were_sent(news: Any) -> None:
    assert decode_news(encode(news)) == news


def test_parameters_arrive_whole() -> None:
    wire = {field.name for field in msgspec.structs.fields(WireParams)}
    assert wire | TEXT_FIELDS == {field.name for field in dataclasses.fields(SamplingParams)}
    assert not wire & TEXT_FIELDS
    arrived = decode_command(encode(SUBMIT))
    assert isinstance(arrived, Submit)
    assert arrived.params.params() == PARAMS


def test_marked_defaults_travel_as_plain_numbers() -> None:
    params = SamplingParams(temperature=unchosen(0.75), top_k=int(unchosen(3)))
    wire = WireParams.of(params)
    assert type(wire.temperature) is float
    assert type(wire.max_tokens) is int
    assert decode_command(encode(msgspec.structs.replace(SUBMIT, params=wire)))


def test_arrays() -> None:
    assert unpacked_ids(packed_ids([0, 5, 2**31 - 1])) == [0, 5, 2**31 - 1]
    assert unpacked_choice_ids(packed_choice_ids([2**62])) == [2**62]
    assert unpacked_floats(packed_floats([-0.5, -9999.0])) == [-0.5, -9999.0]
    assert unpacked_ids(packed_ids([])) == []
    with pytest.raises(MalformedMessageError):
        unpacked_ids(b"12345")


def _corpus() -> list[bytes]:
    chance = random.Random(0)
    encoded = [encode(message) for message in (*COMMANDS, *NEWS)]
    damaged = [
        b"",
        b"\x00",
        b"\xc1",
        b"\x80",
        b"\x91" * 100_000 + b"\x90",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
    ]
    for data in encoded:
        damaged += [data[: len(data) // 2], data + b"\x00", data[1:]]
        for _ in range(40):
            spoiled = bytearray(data)
            for _ in range(chance.randrange(1, 4)):
                spoiled[chance.randrange(len(spoiled))] = chance.randrange(256)
            damaged.append(bytes(spoiled))
    damaged += [chance.randbytes(chance.randrange(1, 200)) for _ in range(300)]
    for value in ({}, [], None, 7, {"type": "unknown"}, {"type": "submit"}, {"type": "abort", "choice_ids": [-1]}):
        damaged.append(msgspec.msgpack.encode(value))
    damaged.append(msgspec.msgpack.encode({"type": "abort", "choice_ids": ["1"]}))
    damaged.append(msgspec.msgpack.encode({**msgspec.to_builtins(COMMANDS[0]), "config": {"depth": 99}}))
    return damaged


def test_damaged_messages_are_refused_or_are_messages() -> None:
    refusals = []
    for data, decode in product(_corpus(), (decode_command, decode_news)):
        try:
            decode(data)
        except MalformedMessageError as error:
            refusals.append(str(error))
    assert len(refusals) > 1000
    assert max(map(len, refusals)) < 120, "they do not quote what came"


@pytest.mark.parametrize(
    "news",
    [
        StepNews(choice_ids=packed_choice_ids([1, 2]), tokens=packed_ids([1]), others=[]),
        StepNews(choice_ids=b"1234567", tokens=b"", others=[]),
        StepNews(choice_ids=packed_choice_ids([1]), tokens=packed_ids([320]), others=[]),
        StepNews(choice_ids=packed_choice_ids([1]), tokens=packed_ids([-1]), others=[]),
        StepNews(
            choice_ids=b"",
            tokens=b"",
            others=[ChoiceNews(4, packed_ids([1]), None, None, None, 0, 0, [], None)],
        ),
        StepNews(
            choice_ids=b"",
            tokens=b"",
            others=[
                ChoiceNews(4, packed_ids([1]), None, None, None, 0, 0, [RatedToken(0.0, 1, packed_ids([1]), b"")], None)
            ],
        ),
        StepNews(
            choice_ids=b"",
            tokens=b"",
            others=[
                ChoiceNews(4, b"", None, None, None, 0, 0, None, [None, RatedToken(0.0, 1, packed_ids([320]), b"1234")])
            ],
        ),
    ],
)
def test_news_that_do_not_hold_together_are_refused(news: StepNews) -> None:
    with pytest.raises(MalformedMessageError):
        step_updates(news, 320)


def test_errors_are_the_same_on_the_other_side() -> None:
    for error in (ConfigError("a"), CheckpointError("b"), UnsupportedModelError("c")):
        back = failure(failure_of(error))
        assert type(back) is type(error)
        assert str(back) == str(error)
    assert isinstance(failure(failure_of(OSError("no such thing"))), EngineDeadError)
    assert "OSError: no such thing" in str(failure(failure_of(OSError("no such thing"))))
    for refused in (RequestError("a"), PromptTooLongError("b"), QueueFullError("c"), EngineDeadError("d")):
        again = refusal(refusal_of(1, refused))
        assert type(again) is type(refused)
        assert str(again) == str(refused)
