"""News on their way out: nothing is lost, and nothing waits, when nobody reads."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from gapless.engine.logprobs import TokenLogprobs
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError, StepTimeoutError
from gapless.outputs import RequestMetrics
from gapless.server.encoding import NEWS_HIGH_WATER_MARK, decode_news
from gapless.server.messages import Accepted, Died, LogLine, News, StepNews
from gapless.server.outbox import Outbox
from gapless.server.received_news import ChoiceUpdate, step_updates

VOCAB = 1000


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[Any, Outbox]]:
    context = zmq.Context()
    reading = context.socket(zmq.PULL)
    reading.set(zmq.RCVHWM, NEWS_HIGH_WATER_MARK)
    reading.set(zmq.RCVTIMEO, 5000)
    reading.bind(f"ipc://{tmp_path}/news")
    sending = context.socket(zmq.PUSH)
    sending.set(zmq.SNDHWM, NEWS_HIGH_WATER_MARK)
    sending.connect(f"ipc://{tmp_path}/news")
    outbox = Outbox(sending)
    yield reading, outbox
    while not outbox.close(0.1):
        with suppress(zmq.Again):
            reading.recv(zmq.NOBLOCK)
    context.destroy(linger=0)


def update(request_id: int, tokens: list[int], **fields: Any) -> RequestUpdate:
    values: dict[str, Any] = {
        "text": None,
        "finish_reason": None,
        "stop_reason": None,
        "error": None,
        "num_cached_tokens": 0,
        "metrics": RequestMetrics(arrived_s=0.0),
        **fields,
    }
    return RequestUpdate(request_id, tokens, **values)


def take(reading: Any) -> News:
    return decode_news(reading.recv())


def as_updates(news: StepNews) -> list[ChoiceUpdate]:
    ids, tokens, others = step_updates(news, VOCAB)
    return [ChoiceUpdate(i, [t], None, None, None, 0, 0, None, None) for i, t in zip(ids, tokens, strict=True)] + others


def test_messages_come_in_order_and_before_the_news_of_later_steps(receiver: tuple[Any, Outbox]) -> None:
    reading, outbox = receiver
    outbox.put(Accepted(call=0, choice_ids=[1]))
    outbox.publish([update(1, [5], num_cached_tokens=16)])
    assert take(reading) == Accepted(call=0, choice_ids=[1])
    [first] = as_updates(take(reading))  # type: ignore[arg-type]
    assert (first.choice_id, first.token_ids, first.num_cached_tokens) == (1, [5], 16)
    outbox.publish([update(1, [6], num_cached_tokens=16)])
    second = take(reading)
    assert isinstance(second, StepNews)
    assert not second.others, "one token and nothing else is packed"
    outbox.publish([update(1, [7], num_cached_tokens=16, finish_reason="stop", stop_reason=7)])
    [last] = as_updates(take(reading))  # type: ignore[arg-type]
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([7], "stop", 7)


def test_nobody_reads_and_nothing_is_lost(receiver: tuple[Any, Outbox]) -> None:
    reading, outbox = receiver
    num_steps, choices = 20_000, range(8)
    began_s = time.monotonic()
    for step in range(num_steps):
        rated = [TokenLogprobs(-float(step), 1, [step % 7], [-1.0])]
        outbox.publish(
            [update(choice, [step % VOCAB], logprobs=list(rated) if choice == 0 else None) for choice in choices]
        )
    assert time.monotonic() - began_s < 60, "publishing never waits for a reader"
    outbox.publish([update(choice, [], finish_reason="length") for choice in choices])
    outbox.engine_died(EngineDeadError("the end"))
    found: dict[int, list[int]] = {choice: [] for choice in choices}
    logprobs: list[float] = []
    num_messages = 0
    while not isinstance(news := take(reading), Died):
        assert isinstance(news, StepNews)
        num_messages += 1
        for each in as_updates(news):
            found[each.choice_id] += each.token_ids
            logprobs += [rated.logprob for rated in each.logprobs or ()]
    assert found == {choice: [step % VOCAB for step in range(num_steps)] for choice in choices}
    assert logprobs == [-float(step) for step in range(num_steps)]
    assert num_messages < num_steps / 10, "what nobody has read was merged"


def test_large_news_go_in_parts(receiver: tuple[Any, Outbox]) -> None:
    reading, outbox = receiver
    rated = [TokenLogprobs(-1.0, 1, list(range(20)), [-1.0] * 20)] * 40_000
    outbox.publish([update(choice, [1], finish_reason="stop", prompt_logprobs=[None, *rated]) for choice in range(4)])
    sizes, ids = [], []
    while len(ids) < 4:
        data = reading.recv()
        sizes.append(len(data))
        news = decode_news(data)
        assert isinstance(news, StepNews)
        for each in news.others:
            ids.append(each.choice_id)
            assert each.prompt_logprobs is not None
            assert len(each.prompt_logprobs) == 40_001
    assert ids == [0, 1, 2, 3]
    assert len(sizes) > 1
    assert max(sizes) < 32 << 20


def test_prompt_log_probs_are_told_once(receiver: tuple[Any, Outbox]) -> None:
    reading, outbox = receiver
    prompt_logprobs = [None, TokenLogprobs(-1.0, 1, [], [])]
    told = []
    for token in range(3):
        outbox.publish([update(1, [token], prompt_logprobs=prompt_logprobs, logprobs=[TokenLogprobs(0.0, 1, [], [])])])
        [each] = as_updates(take(reading))  # type: ignore[arg-type]
        told.append(each.prompt_logprobs)
    assert told == [prompt_logprobs, None, None]


@pytest.mark.parametrize(
    ("error", "kind"), [(EngineDeadError("why"), "error"), (StepTimeoutError("why"), "step_timeout")]
)
def test_the_cause_of_the_end_comes_last(receiver: tuple[Any, Outbox], error: EngineDeadError, kind: Any) -> None:
    reading, outbox = receiver
    outbox.publish([update(1, [1])])
    outbox.engine_died(error)
    assert isinstance(take(reading), StepNews)
    assert take(reading) == Died(kind=kind, message="why")


def test_log_lines_that_nobody_reads_are_bounded(receiver: tuple[Any, Outbox]) -> None:
    reading, outbox = receiver
    for number in range(5000):
        outbox.put(LogLine(level=20, text=str(number)))
    outbox.put(Accepted(call=9, choice_ids=[]))
    num_lines = 0
    while isinstance(take(reading), LogLine):
        num_lines += 1
    assert 1000 <= num_lines < 5000
