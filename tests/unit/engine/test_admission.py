"""What can never be served is refused before it is queued, with numbers and a remedy."""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import pytest

from gapless.engine.admission import AdmissionLimits
from gapless.engine.request import EngineRequest
from gapless.errors import PromptTooLongError, QueueFullError, RequestError
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling_params import SamplingParams, are_token_ids
from simulation.harness import Rig
from simulation.setting import greedy, make_setting

_LIMITS = AdmissionLimits(vocab_size=61, max_model_len=50, kv_capacity=40, max_waiting=3)


def _request(prompt: Sequence[object], **options: object) -> EngineRequest:
    return EngineRequest(prompt_token_ids=prompt, params=SamplingParams(temperature=0, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "token", [-1, 61, 2**31, 2**63, 10**40, 1.0, True, "3", None], ids=lambda token: f"{type(token).__name__}-{token}"
)
def test_c25_prompt_ids_outside_the_vocabulary_name_field_and_value(token: object) -> None:
    with pytest.raises(RequestError, match=r"prompt_token_ids\[2\]=.* not in the vocabulary of 61 tokens"):
        _LIMITS.check(_request([1, 2, token, 4]))


@pytest.mark.parametrize("bad", [[1], (1,), np.int64(1), np.float32(1), np.bool_(True), float("nan")])
def test_c25_what_is_no_plain_integer_is_no_id(bad: object) -> None:
    assert not are_token_ids([1, bad, 2], 61)
    with pytest.raises(RequestError, match=r"prompt_token_ids\[1\]="):
        _LIMITS.check(_request([1, bad, 2]))


@pytest.mark.parametrize("ids", [[0], [60], (0, 60, 30)])
def test_c25_all_ids_of_the_vocabulary_are_taken(ids: Sequence[int]) -> None:
    assert are_token_ids(ids, 61)
    assert _LIMITS.check(_request(ids, max_tokens=None)) == 41 - len(ids)


def test_c25_a_subclass_of_int_is_an_id() -> None:
    class Marker(IntEnum):
        START = 3

    assert _LIMITS.check(_request([Marker.START], max_tokens=None)) == 40


def test_c25_stop_token_ids_outside_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="stop_token_ids=61 is not in the vocabulary of 61 tokens"):
        _LIMITS.check(_request([1], stop_token_ids=[60, 61]))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        _LIMITS.check(_request([]))


@pytest.mark.parametrize(
    ("length", "wanted", "given"),
    [(1, None, 40), (40, None, 1), (38, 100, 3), (38, 3, 3), (38, 2, 2), (40, 0, 0), (5, 10**30, 36)],
)
def test_max_tokens_is_cut_to_the_room(length: int, wanted: int | None, given: int) -> None:
    assert _LIMITS.check(_request([1] * length, max_tokens=wanted)) == given


def test_c09_a_prompt_larger_than_the_cache_names_what_it_needs_and_what_there_is() -> None:
    with pytest.raises(PromptTooLongError, match="needs 41 tokens of KV cache and 40 are available"):
        _LIMITS.check(_request([1] * 41))


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    with pytest.raises(PromptTooLongError, match="has 51 tokens and the context holds max_model_len=50"):
        _LIMITS.check(_request([1] * 51))


def test_c09_eight_blocks_of_sixteen() -> None:
    setting = make_setting(num_blocks=8, block_size=16, max_model_len=1000, token_budget=64, chunk_size=64)
    rig = Rig(setting, SimulatorQueues(9))
    with pytest.raises(PromptTooLongError, match="200 tokens of KV cache and 128"):
        rig.engine.submit([greedy([1] * 200)], lambda ids: None)

    short = [setting.plan(greedy([token, 2, 3], 6)) for token in range(5)]
    outgrows = setting.plan(greedy(list(range(60)) + list(range(40)), 100))
    exactly = setting.plan(greedy([7] * 100, 29))
    too_long = setting.plan(greedy([8] * 128, 2))
    planned = [*short, outgrows, exactly, too_long]
    ids = [rig.submit(each) for each in planned]
    rig.run_until_idle()

    for request_id, each in zip(ids, planned, strict=True):
        rig.check_output(each, request_id)
        assert rig.sink.ends[request_id].finish_reason == "length"
    given = [len(rig.sink.ids[request_id]) for request_id in ids]
    # 128 positions hold 100 of the prompt and 28 that are fed back; the 29th token is not.
    assert given == [6] * 5 + [29, 29, 1]


def test_c09_the_whole_cache_can_be_one_prompt() -> None:
    setting = make_setting(num_blocks=8, block_size=16, token_budget=8, chunk_size=8)
    rig = Rig(setting, SimulatorQueues(1))
    planned = setting.plan(greedy([5] * 128, None))
    request_id = rig.submit(planned)
    rig.run_until_idle()
    rig.check_output(planned, request_id)
    assert len(rig.sink.ids[request_id]) == 1
    with pytest.raises(PromptTooLongError):
        rig.engine.submit([greedy([5] * 129)], lambda ids: None)


def test_the_queue_has_a_limit_that_counts_what_is_not_taken_yet() -> None:
    rig = Rig(make_setting(max_waiting=3, max_rows=1), SimulatorQueues(2))
    plan = rig.setting.plan
    ids = [rig.submit(plan(greedy([token], 5))) for token in range(3)]
    with pytest.raises(QueueFullError, match="1 more requests would make 4 queued; at most max_waiting=3"):
        rig.submit(plan(greedy([9], 5)))
    rig.turn()
    assert rig.engine.counters().waiting == 2, "one runs, and a row for no other"

    # An abort in the same batch of commands must not hide a request that was just queued.
    rig.abort(ids[2])
    ids.append(rig.submit(plan(greedy([10], 5))))
    rig.turn()
    assert rig.engine.counters().waiting == 2
    ids.append(rig.submit(plan(greedy([11], 5))))
    with pytest.raises(QueueFullError):
        rig.submit(plan(greedy([12], 5)))

    rig.run_until_idle()
    assert sorted(rig.sink.ends) == ids


def test_requests_that_come_together_are_queued_together_or_not_at_all() -> None:
    rig = Rig(make_setting(max_waiting=3), SimulatorQueues(2))
    told: list[list[int]] = []
    with pytest.raises(RequestError):
        rig.engine.submit([greedy([1]), greedy([99])], told.append)
    with pytest.raises(QueueFullError):
        rig.engine.submit([greedy([1])] * 4, told.append)
    assert told == []
    assert rig.engine.counters().waiting == 0
