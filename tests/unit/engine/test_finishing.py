"""How requests end: by length, foreseen; by EOS and stop ids, not foreseen; by an error of their own; by an abort."""

import pytest

from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling_params import SamplingParams
from simulation.audit import AuditedCache
from simulation.harness import Rig
from simulation.hash_model import VOCAB_SIZE
from simulation.setting import EngineRequest, PlannedRequest, greedy, make_setting

_DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])


def _run(rig: Rig, planned: PlannedRequest) -> int:
    request_id = rig.submit(planned)
    rig.run_until_idle()
    rig.check_output(planned, request_id)
    return request_id


@_DEPTHS
@pytest.mark.parametrize("most", [1, 2, 17])
def test_c07_max_tokens_is_exactly_as_many_sampling_steps(depth: int, most: int) -> None:
    for seed in range(5):
        rig = Rig(make_setting(depth=depth), SimulatorQueues(seed))
        request_id = _run(rig, rig.setting.plan(greedy([1, 2, 3], most)))

        assert len(rig.sink.ids[request_id]) == most
        assert rig.sink.ends[request_id].finish_reason == "length"
        assert rig.audit.num_samples[request_id] == most
        # One step for the prompt, which samples, and one for each further token.
        assert rig.engine.counters().steps == most


@_DEPTHS
def test_c07_eos_costs_at_most_a_row_for_each_further_step_in_flight(depth: int) -> None:
    for seed in range(5):
        rig = Rig(make_setting(depth=depth), SimulatorQueues(seed))
        ids = rig.setting.plan(greedy([4, 5], 20)).expected.token_ids
        eos = ids[6]
        place = ids.index(eos)
        request_id = _run(rig, rig.setting.plan(greedy([4, 5], 20, stop=[eos])))

        assert rig.sink.ids[request_id] == list(ids[: place + 1])
        assert rig.sink.ends[request_id].finish_reason == "stop"
        assert rig.sink.ends[request_id].stop_reason is None, "EOS is nobody's stop id"
        extra = rig.audit.num_samples[request_id] - (place + 1)
        assert extra == depth - 1
        assert rig.engine.counters().output_tokens == place + 1


@_DEPTHS
def test_c07_eos_on_the_last_token_is_a_stop(depth: int) -> None:
    rig = Rig(make_setting(depth=depth), SimulatorQueues(depth))
    ids = rig.setting.plan(greedy([4, 5], 9)).expected.token_ids
    most = next(count for count in range(9, 0, -1) if ids[count - 1] not in ids[: count - 1])
    request_id = _run(rig, rig.setting.plan(greedy([4, 5], most, stop=[ids[most - 1]])))

    assert rig.sink.ends[request_id].finish_reason == "stop"
    assert rig.audit.num_samples[request_id] == most


def test_a_stop_id_of_the_request_is_its_stop_reason() -> None:
    rig = Rig(make_setting(), SimulatorQueues(0))
    ids = rig.setting.plan(greedy([8], 9)).expected.token_ids
    eos = next(token for token in range(61) if token not in ids)
    source = EngineRequest(
        prompt_token_ids=[8],
        params=SamplingParams(temperature=0, max_tokens=9, stop_token_ids=[ids[2]]),
        stop_token_ids=frozenset([ids[2], eos]),
    )
    request_id = _run(rig, rig.setting.plan(source))

    assert rig.sink.ends[request_id].stop_reason == ids[2]


@_DEPTHS
def test_what_comes_after_eos_is_in_no_cache_key(depth: int) -> None:
    rig = Rig(make_setting(depth=depth, block_size=1), SimulatorQueues(depth))
    plain = rig.setting.plan(greedy([4, 5], 12)).expected.token_ids
    eos = plain[3]
    end = plain.index(eos) + 1
    _run(rig, rig.setting.plan(greedy([4, 5], 12, stop=[eos])))

    # The same tokens as a prompt: everything before EOS comes from the cache, EOS and what follows does not.
    again = rig.setting.plan(greedy([4, 5, *plain[:12]], 2))
    request_id = _run(rig, again)
    assert rig.sink.ends[request_id].num_cached_tokens == 2 + end - 1


@_DEPTHS
def test_c07_min_tokens_masks_eos_and_stop_ids_until_then(depth: int) -> None:
    rig = Rig(make_setting(depth=depth), SimulatorQueues(depth))
    plain = rig.setting.plan(greedy([4, 5], 12)).expected.token_ids
    stops = set(plain[:4])
    for least in (0, 1, 3, 6, 12):
        planned = rig.setting.plan(greedy([4, 5], 12, stop=stops, min_tokens=least))
        request_id = _run(rig, planned)

        given = rig.sink.ids[request_id]
        assert not stops & set(given[:least])
        assert len(given) >= max(least, 1)


@_DEPTHS
@pytest.mark.parametrize("length", [1, 4, 9])
def test_max_tokens_0_ends_at_the_prompt_without_sampling(depth: int, length: int) -> None:
    rig = Rig(make_setting(depth=depth, chunk_size=3), SimulatorQueues(length))
    request_id = _run(rig, rig.setting.plan(greedy(list(range(length)), 0)))

    assert rig.sink.ids[request_id] == []
    assert rig.sink.ends[request_id].finish_reason == "length"
    assert rig.audit.num_samples[request_id] == 0
    assert rig.engine.counters().steps == -(-length // 3)


_POISON = VOCAB_SIZE - 1


def _clean(rig: Rig, token: int, *, random: bool) -> PlannedRequest:
    if not random:
        return rig.setting.plan(greedy([token, 2, 3, 4, 5], 6))
    params = SamplingParams(temperature=0.8, seed=40 + token, max_tokens=6)
    return rig.setting.plan(EngineRequest(prompt_token_ids=[token, 2, 3, 4, 5], params=params))


@_DEPTHS
@pytest.mark.parametrize("random", [False, True], ids=["greedy", "sampled"])
def test_c14_an_unhealthy_request_fails_alone(depth: int, random: bool) -> None:
    rig = Rig(make_setting(depth=depth, poison=_POISON), SimulatorQueues(depth))
    planned = [
        _clean(rig, 1, random=random),
        rig.setting.plan(greedy([1, 2, 3, 4, 7, _POISON], 6)),
        _clean(rig, 9, random=random),
    ]
    ids = [rig.submit(each) for each in planned]
    rig.run_until_idle()

    assert [rig.sink.ends[request_id].finish_reason for request_id in ids] == ["length", "error", "length"]
    for request_id, each in zip(ids, planned, strict=True):
        rig.check_output(each, request_id)
    failed = rig.sink.ends[ids[1]]
    assert failed.error is not None
    assert "not finite at output token 0" in failed.error
    assert failed.metrics.finished_s is not None


def test_c14_unhealthy_blocks_are_withdrawn_and_clean_requests_on_them_are_right() -> None:
    rig = Rig(make_setting(poison=_POISON, num_blocks=4, block_size=2), SimulatorQueues(3))
    poisoned = [1, 2, _POISON, 4, 5, 6, 7]
    _run(rig, rig.setting.plan(greedy(poisoned, 2)))

    assert len(rig.scheduler.pool.cache) == 0
    assert rig.engine.counters().free_blocks == 4
    for token in range(6):
        _run(rig, rig.setting.plan(greedy([token, 1, 2, 3], 5)))
    again = _run(rig, rig.setting.plan(greedy(poisoned, 2)))
    assert rig.sink.ends[again].num_cached_tokens == 0


def test_c14_a_token_that_turns_out_unhealthy_ends_the_request_after_what_was_healthy() -> None:
    rig = Rig(make_setting(depth=3), SimulatorQueues(3))
    first, second = rig.setting.plan(greedy([7, 8], 2)).expected.token_ids
    assert first != second
    poisoned = Rig(make_setting(depth=3, poison=second), SimulatorQueues(3))
    planned = poisoned.setting.plan(greedy([7, 8], 9))
    request_id = _run(poisoned, planned)

    assert poisoned.sink.ids[request_id] == [first, second]
    end = poisoned.sink.ends[request_id]
    assert (end.finish_reason, end.error is not None and "output token 2" in end.error) == ("error", True)


@_DEPTHS
def test_aborts_free_everything_whatever_the_state(depth: int) -> None:
    for seed in range(6):
        rig = Rig(make_setting(depth=depth, max_rows=2, num_blocks=6), SimulatorQueues(seed))
        planned = [rig.setting.plan(greedy([token, 2, 3], None, streams=True)) for token in range(5)]
        ids = [rig.submit(each) for each in planned]
        for _ in range(seed):
            rig.turn()
        for request_id in (*ids, ids[0], 12345):
            rig.abort(request_id)
        rig.run_until_idle()

        assert {end.finish_reason for end in rig.sink.ends.values()} == {"abort"}
        assert rig.engine.counters().aborted == 5
        for request_id, each in zip(ids, planned, strict=True):
            rig.check_output(each, request_id)
        assert isinstance(rig.scheduler.pool.cache, AuditedCache)
        _run(rig, rig.setting.plan(greedy(list(range(20)), None)))


def test_an_abort_in_the_turn_of_arrival_never_prefills() -> None:
    rig = Rig(make_setting(), SimulatorQueues(0))
    request_id = rig.submit(rig.setting.plan(greedy([1, 2], 5)))
    rig.abort(request_id)
    rig.run_until_idle()
    assert rig.engine.counters().steps == 0
    assert rig.sink.ends[request_id].finish_reason == "abort"


def test_streamed_tokens_come_as_they_are_known_and_others_at_the_end() -> None:
    rig = Rig(make_setting(depth=2), SimulatorQueues(0))
    streamed = rig.submit(rig.setting.plan(greedy([1], 6, streams=True)))
    whole = rig.submit(rig.setting.plan(greedy([2], 6)))
    seen: list[int] = []
    while rig.engine.has_work:
        rig.turn()
        seen.append(len(rig.sink.ids.get(streamed, [])))
        assert streamed in rig.sink.ends or whole not in rig.sink.ids
    assert set(seen) == {0, 1, 2, 3, 4, 5, 6}


@_DEPTHS
def test_metrics_follow_a_request(depth: int) -> None:
    rig = Rig(make_setting(depth=depth), SimulatorQueues(0))
    request_id = _run(rig, rig.setting.plan(greedy([1, 2], 4)))
    metrics = rig.sink.ends[request_id].metrics
    assert metrics.ttft_s is not None
    assert metrics.finished_s is not None
    assert metrics.first_token_s is not None
    assert metrics.arrived_s < metrics.first_token_s <= metrics.finished_s
    assert metrics.num_preemptions == 0
