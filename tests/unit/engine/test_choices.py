"""Choices of one request: they share the blocks of their prompt, and are requests of their own in everything else."""

from dataclasses import replace

import pytest

from gapless.engine.request import EngineRequest, choice_seed
from gapless.errors import QueueFullError
from gapless.pipeline.streams.simulator import SimulatorQueues
from simulation.harness import Rig
from simulation.setting import PlannedRequest, Setting, greedy, make_setting

PROMPT = list(range(13))  # three blocks of four, and the token that is always computed


def choices(n: int, prompt: list[int] = PROMPT, max_tokens: int = 6) -> EngineRequest:
    source = greedy(prompt, max_tokens)
    return replace(source, params=replace(source.params, n=n, temperature=1.0))


def rig_of(setting: Setting, seed: int = 0) -> Rig:
    return Rig(setting, SimulatorQueues(seed))


def submitted(rig: Rig, source: EngineRequest) -> tuple[PlannedRequest, int]:
    planned = rig.setting.plan_seeded(source)
    return planned, rig.submit(planned)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_enter_with_the_end_of_the_prompt_and_share_it(depth: int, prefix_caching: bool) -> None:
    rig = rig_of(make_setting(depth=depth, chunk_size=4, token_budget=6, prefix_caching=prefix_caching))
    planned, request_id = submitted(rig, choices(3))
    assert rig.engine.counters().waiting == 3
    rig.turn()
    assert (rig.engine.counters().running, rig.engine.counters().waiting) == (1, 2), "the others follow the first"
    most_used = 0
    while rig.engine.has_work:
        rig.turn()
        running = rig.scheduler.running
        assert len({tuple(request.blocks[:3]) for request in running}) <= 1
        most_used = max(most_used, rig.scheduler.pool.num_in_use)
    rig.check_output(planned, request_id)
    # The prompt takes three steps of four tokens; in the fourth, all three sample.
    assert rig.scheduler.num_steps == 3 + 6
    assert most_used == 3 + 3 * 2
    assert len({tuple(rig.sink.ids[choice_id]) for choice_id in rig.choice_ids(request_id)}) == 3
    rig.check_idle()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_choices_need_not_run_together(prefix_caching: bool) -> None:
    rig = rig_of(make_setting(max_rows=1, num_blocks=5, prefix_caching=prefix_caching))
    planned, request_id = submitted(rig, choices(4))
    rig.run_until_idle()
    rig.check_output(planned, request_id)
    cached = [rig.sink.ends[choice_id].num_cached_tokens for choice_id in rig.choice_ids(request_id)]
    assert cached == [0, 12, 12, 12]


def test_without_a_prefix_cache_nobody_else_finds_the_prompt() -> None:
    rig = rig_of(make_setting(prefix_caching=False))
    for _ in range(2):
        _, first = submitted(rig, choices(2))
        _, alone = submitted(rig, choices(1))
        rig.run_until_idle()
        assert rig.sink.ends[first].num_cached_tokens == rig.sink.ends[alone].num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("first_only", [True, False])
def test_an_abort_in_the_prompt(seed: int, first_only: bool) -> None:
    """Of all choices, or of the first one, whom the others follow."""
    rig = rig_of(make_setting(depth=1 + seed % 3, chunk_size=4, token_budget=4), seed)
    planned, request_id = submitted(rig, choices(3))
    other, other_id = submitted(rig, choices(2, [40, 41, 42]))
    for _ in range(seed % 3):
        rig.turn()
    rig.abort(request_id, first_only=first_only)
    rig.run_until_idle()
    rig.check_output(planned, request_id)
    rig.check_output(other, other_id)
    aborted = [rig.sink.ends[choice_id].finish_reason == "abort" for choice_id in rig.choice_ids(request_id)]
    assert aborted == [True, not first_only, not first_only]
    assert rig.engine.counters().aborted == sum(aborted)


def test_choices_keep_their_place_in_the_queue() -> None:
    rig = rig_of(make_setting(max_rows=1, num_blocks=8))
    _, first = submitted(rig, choices(3))
    _, second = submitted(rig, choices(2, [40, 41, 42]))
    rig.run_until_idle()
    ends = list(rig.sink.ends)
    assert ends == [*rig.choice_ids(first), *rig.choice_ids(second)]


def test_each_choice_counts_in_the_queue() -> None:
    rig = rig_of(make_setting(max_waiting=5))
    submitted(rig, choices(3))
    with pytest.raises(QueueFullError, match="3 more requests would make 6 queued"):
        submitted(rig, choices(3))
    submitted(rig, choices(2))
    rig.run_until_idle()


def test_c23_seeds_of_choices() -> None:
    seeds = [choice_seed(7, index) for index in range(1000)]
    assert seeds[0] == 7, "the first choice is what n=1 gives"
    assert len(set(seeds) | {choice_seed(8, index) for index in range(1000)}) == 2000
    assert seeds == [choice_seed(7, index) for index in range(1000)]
    assert all(-(2**63) <= seed < 2**63 for seed in [*seeds, choice_seed(-(2**63), 3), choice_seed(None, 0)])
    assert len({choice_seed(None, 0) for _ in range(100)}) == 100
