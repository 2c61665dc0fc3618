"""The scheduler's rules: order, budget, chunks, admission, the prefix cache, and what cannot change an output."""

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from gapless.engine import prefix_cache
from gapless.engine.request import EngineRequest
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.streams.simulator import SimulatorQueues
from gapless.sampling_params import SamplingParams
from simulation.harness import Rig
from simulation.setting import PlannedRequest, Setting, greedy, make_setting


def _serve(setting: Setting, sources: Iterable[EngineRequest], seed: int = 0) -> Rig:
    """Serve requests that come together and compare each with what it gives alone."""
    rig = Rig(setting, SimulatorQueues(seed))
    planned = [setting.plan(source) for source in sources]
    ids = [rig.submit(each) for each in planned]
    rig.run_until_idle()
    for request_id, each in zip(ids, planned, strict=True):
        rig.check_output(each, request_id)
    return rig


def _shape(batch: ScheduledBatch | None) -> list[tuple[int, int]]:
    """Which request has how many tokens in a step."""
    assert batch is not None
    return [(entry.request_id, entry.num_tokens) for entry in batch.entries]


class _Steps:
    """A rig whose steps are looked at one by one, as long as none has to come back."""

    def __init__(self, setting: Setting) -> None:
        self.rig = Rig(setting, SimulatorQueues(0))
        self.seen: list[list[tuple[int, int]]] = []
        schedule = self.rig.scheduler.schedule

        def watched() -> ScheduledBatch | None:
            batch = schedule()
            if batch is not None:
                self.seen.append(_shape(batch))
            return batch

        self.rig.scheduler.schedule = watched  # type: ignore[method-assign]

    def run(self, *sources: EngineRequest) -> list[list[tuple[int, int]]]:
        planned = [self.rig.setting.plan(source) for source in sources]
        for each in planned:
            self.rig.submit(each)
        self.rig.run_until_idle()
        for request_id, each in enumerate(planned):
            self.rig.check_output(each, request_id)
        return self.seen


def test_decodes_come_first_then_prefills_then_admissions_within_the_budget() -> None:
    steps = _Steps(make_setting(token_budget=6, chunk_size=4, num_blocks=40)).run(
        greedy([1, 2], 5), greedy([3] * 9, 2), greedy([4] * 3, 2)
    )
    assert steps == [
        [(0, 2), (1, 4)],
        [(0, 1), (1, 4), (2, 1)],
        # Both prefills are down to a single token for the second request, which goes with the decodes.
        [(0, 1), (1, 1), (2, 2)],
        [(0, 1), (1, 1), (2, 1)],
        [(0, 1)],
    ]


def test_admission_is_by_arrival_and_nobody_overtakes() -> None:
    # The second request needs more than is left; the third would fit.
    steps = _Steps(make_setting(num_blocks=4, block_size=2, max_rows=3, prefix_caching=False)).run(
        greedy([1, 2, 3], 3), greedy([4] * 6, 2), greedy([5], 1)
    )
    assert [request for request, _ in steps[0]] == [0]
    first_of = {request: next(i for i, step in enumerate(steps) if request in dict(step)) for request in range(3)}
    assert first_of[1] <= first_of[2]


def test_a_row_is_free_again_in_the_step_after_the_last_one() -> None:
    steps = _Steps(make_setting(depth=3, max_rows=1)).run(greedy([1], 2), greedy([2], 2))
    # With three steps in flight nothing has come back when the second request takes the row over.
    assert steps == [[(0, 1)], [(0, 1)], [(1, 1)], [(1, 1)]]


def test_a_spare_block_for_each_running_request_is_kept_at_admission() -> None:
    setting = make_setting(num_blocks=4, block_size=4, prefix_caching=False)
    steps = _Steps(setting).run(greedy([1] * 4, 2), greedy([2] * 8, 3), greedy([3] * 4, 1))
    # One block is in use, two for the second request leave one: the spare of the first. The third needs three.
    assert steps[0] == [(0, 4), (1, 8)]
    first_of_third = next(i for i, step in enumerate(steps) if 2 in dict(step))
    assert not any(0 in dict(step) for step in steps[first_of_third:]), "it comes when the first has left"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_c11_a_second_run_takes_all_but_the_last_token_from_the_cache(depth: int, size: int) -> None:
    for length in (1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 3 * size):
        rig = Rig(make_setting(depth=depth, block_size=size), SimulatorQueues(length))
        cached = []
        for _ in range(2):
            planned = rig.setting.plan(greedy(list(range(length)), 3))
            request_id = rig.submit(planned)
            rig.run_until_idle()
            rig.check_output(planned, request_id)
            cached.append(rig.sink.ends[request_id].num_cached_tokens)
        assert cached == [0, (length - 1) // size * size]


def test_c11_a_hit_within_the_same_step_is_right() -> None:
    rig = _serve(make_setting(token_budget=64, chunk_size=64, num_blocks=32), [greedy([5] * 9, 4)] * 3)
    assert [rig.sink.ends[request].num_cached_tokens for request in range(3)] == [0, 8, 8]


def test_c11_salts_and_switched_off_caching_share_nothing() -> None:
    salted = [greedy([5] * 9, 2, salt=salt) for salt in (b"a", b"b", b"a")]
    rig = _serve(make_setting(max_rows=1), salted)
    assert [rig.sink.ends[request].num_cached_tokens for request in range(3)] == [0, 0, 8]

    rig = _serve(make_setting(max_rows=1, prefix_caching=False), [greedy([5] * 9, 2)] * 2)
    assert [rig.sink.ends[request].num_cached_tokens for request in range(2)] == [0, 0]
    assert rig.engine.counters().free_blocks == 16


@pytest.mark.parametrize("constant_keys", [False, True], ids=["blake2b", "constant keys"])
def test_c11_thirty_prompts_with_shared_prefixes(monkeypatch: pytest.MonkeyPatch, constant_keys: bool) -> None:
    if constant_keys:
        monkeypatch.setattr(prefix_cache, "block_key", lambda parent, tokens: b"the same for all")
    chance = random.Random(11)
    base = [chance.randrange(60) for _ in range(20)]
    prompts = [base[: chance.randint(1, 20)] + [chance.randrange(60)] * chance.randint(0, 3) for _ in range(30)]
    for seed in range(3):
        chance.shuffle(prompts)
        rig = _serve(make_setting(num_blocks=12, block_size=2), [greedy(prompt, 4) for prompt in prompts], seed)
        hits = sum(end.num_cached_tokens for end in rig.sink.ends.values())
        assert constant_keys or hits > 100


def test_generated_tokens_are_cached_too() -> None:
    rig = Rig(make_setting(block_size=2, depth=1), SimulatorQueues(0))
    planned = rig.setting.plan(greedy([1, 2, 3], 6))
    rig.submit(planned)
    rig.run_until_idle()
    longer = rig.setting.plan(greedy([1, 2, 3, *planned.expected.token_ids], 2))
    request_id = rig.submit(longer)
    rig.run_until_idle()
    rig.check_output(longer, request_id)
    # Nine tokens; the last of the first request was never fed to the model.
    assert rig.sink.ends[request_id].num_cached_tokens == 8


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("budget", [8, 64])
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_c10_no_setting_changes_an_output(chunk: int, budget: int, size: int) -> None:
    lengths = sorted({1, max(size - 1, 1), size, size + 1, min(3 * chunk, 40)})
    sources = [greedy([length] * length, 6) for length in lengths]
    sources.append(EngineRequest(prompt_token_ids=[7, 8], params=SamplingParams(temperature=0.8, seed=3, max_tokens=8)))
    needed = -(-(max(lengths) + 5) // size)
    for depth, num_blocks in ((1, 64), (2, needed), (3, needed + 1)):
        setting = make_setting(
            depth=depth, chunk_size=chunk, token_budget=budget, block_size=size, num_blocks=max(num_blocks, 1)
        )
        _serve(setting, sources, seed=chunk + size)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_c02_forty_chunked_prompts_in_eight_rows(depth: int) -> None:
    chance = random.Random(2)
    sources = [greedy([chance.randrange(60) for _ in range(chance.randint(5, 30))], 6) for _ in range(40)]
    setting = make_setting(depth=depth, max_rows=8, chunk_size=4, token_budget=16, num_blocks=80, buckets=(1, 4, 8))
    _serve(setting, sources, seed=depth)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [3, 64])
def test_c03_a_preempted_request_loses_and_doubles_nothing(depth: int, chunk: int) -> None:
    preemptions = 0
    for seed in range(10):
        prompts = [[token, seed] for token in range(6)]
        random.Random(seed).shuffle(prompts)
        # Room for about one and a half requests of 22 positions.
        setting = make_setting(depth=depth, chunk_size=chunk, num_blocks=17, block_size=2, prefix_caching=seed % 2 == 0)
        rig = _serve(setting, [greedy(prompt, 20) for prompt in prompts], seed)
        preemptions += rig.engine.counters().preemptions
        for request in rig.audit.requests.values():
            assert request.in_flight == 0
        for end in rig.sink.ends.values():
            assert end.metrics.num_preemptions <= rig.engine.counters().preemptions
    assert preemptions > 10


def test_a_preempted_seeded_request_draws_the_same() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed, top_k=20, max_tokens=20) for seed in range(6)]
    sources = [EngineRequest(prompt_token_ids=[9, 9], params=each) for each in params]
    rig = _serve(make_setting(depth=3, num_blocks=17, block_size=2), sources)
    assert rig.engine.counters().preemptions > 0


def test_the_latest_arrival_is_preempted_and_comes_back_before_later_ones() -> None:
    rig = Rig(make_setting(num_blocks=6, block_size=2, max_rows=3, prefix_caching=False), SimulatorQueues(0))
    planned = [rig.setting.plan(greedy([token], 8)) for token in range(4)]
    for each in planned:
        rig.submit(each)
    preempted: list[int] = []
    while rig.engine.has_work:
        before = rig.engine.counters().preemptions
        running = [request.id for request in rig.scheduler.running]
        rig.turn()
        if rig.engine.counters().preemptions > before:
            gone = set(running) - {request.id for request in rig.scheduler.running}
            preempted += sorted(gone, reverse=True)[: rig.engine.counters().preemptions - before]
        waiting = [request.id for request in rig.scheduler.waiting]
        assert waiting == sorted(waiting), "by arrival"
    assert preempted
    assert 0 not in preempted, "the oldest request always makes progress"
    for request_id, each in enumerate(planned):
        rig.check_output(each, request_id)


def test_c20_values_beyond_the_device_types_mean_their_limits() -> None:
    """top_k and temperature travel as int32 and fp32: a larger one killed the step that sent it, and the engine."""
    setting = make_setting(prefix_caching=False)
    alone = setting.plan(greedy([3], 3)).expected
    normal = SamplingParams(temperature=0.5, seed=1, max_tokens=3)
    expected = {
        SamplingParams(temperature=0.5, seed=1, top_k=10**30, max_tokens=3): setting.plan(
            EngineRequest(prompt_token_ids=[3], params=normal)
        ).expected,
        SamplingParams(temperature=1e-300, seed=3, max_tokens=3): alone,
        SamplingParams(temperature=1.0, seed=-(2**63), top_p=1e-300, max_tokens=3): alone,
        SamplingParams(temperature=1.0, seed=2**63 - 1, min_p=1.0, max_tokens=3): alone,
    }
    rig = Rig(setting, SimulatorQueues(0))
    planned = [
        PlannedRequest(source=EngineRequest(prompt_token_ids=[3], params=params), expected=output)
        for params, output in expected.items()
    ]
    ids = [rig.submit(each) for each in planned]
    hottest = EngineRequest(prompt_token_ids=[3], params=SamplingParams(temperature=1e300, seed=2, max_tokens=3))
    [hot] = rig.engine.submit([hottest], lambda new: None)
    rig.run_until_idle()

    for request_id, each in zip(ids, planned, strict=True):
        rig.check_output(each, request_id)
    assert rig.sink.ends[hot].finish_reason == "length"


@pytest.mark.parametrize("seed", range(4))
def test_c13_five_hundred_random_operations(seed: int) -> None:
    """The rig checks counts and holders in every turn."""
    chance = random.Random(f"c13-{seed}")
    setting = make_setting(
        depth=1 + seed % 3, num_blocks=16, block_size=2, max_rows=5, prefix_caching=seed != 3, chunk_size=4
    )
    rig = Rig(setting, SimulatorQueues(seed))
    base = [chance.randrange(60) for _ in range(12)]
    served: dict[int, PlannedRequest] = {}
    for _ in range(500):
        what = chance.choice(["submit", "abort", "turn", "turn", "turn"])
        if what == "submit" and len(rig.scheduler.waiting) < 10:
            prompt = base[: chance.randint(1, 12)] + [chance.randrange(60)] * chance.randint(0, 2)
            source = greedy(prompt, chance.choice([0, 1, 1, 2, 5]))
            params = replace(source.params, n=chance.randint(1, 3), temperature=chance.choice([0, 1.0]))
            planned = rig.setting.plan_seeded(replace(source, params=params), len(served))
            served[rig.submit(planned)] = planned
        elif what == "abort" and served:
            rig.abort(chance.choice(list(served)), first_only=chance.random() < 0.3)
        if rig.engine.has_work:
            rig.turn()
    rig.run_until_idle()
    for request_id, planned in served.items():
        rig.check_output(planned, request_id)
    everything = rig.setting.plan(greedy(list(range(30)), None))
    request_id = rig.submit(everything)
    rig.run_until_idle()
    rig.check_output(everything, request_id)
    assert len(rig.sink.ids[request_id]) == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c22_neighbours_rows_and_depth_leave_a_seeded_request_alone(depth: int) -> None:
    mine = EngineRequest(
        prompt_token_ids=[1, 2, 3], params=SamplingParams(temperature=0.8, seed=42, max_tokens=12, top_p=0.95)
    )
    chance = random.Random(22)
    for num_neighbours in range(8):
        setting = make_setting(depth=depth, max_rows=8, num_blocks=80)
        rig = Rig(setting, SimulatorQueues(num_neighbours))
        planned = setting.plan(mine)
        neighbours = [
            setting.plan(
                EngineRequest(
                    prompt_token_ids=[4 + other],
                    params=SamplingParams(temperature=0.9, seed=100 + other, max_tokens=10),
                )
            )
            for other in range(num_neighbours)
        ]
        order = [planned, *neighbours]
        chance.shuffle(order)
        served: dict[int, PlannedRequest] = {}
        for each in order:
            served[rig.submit(each)] = each
            for _ in range(chance.randint(0, 2)):
                rig.turn()
        rig.run_until_idle()
        for request_id, each in served.items():
            rig.check_output(each, request_id)


def test_the_counters_of_an_idle_engine_are_zero() -> None:
    rig = Rig(make_setting(), SimulatorQueues(0))
    counters = rig.engine.counters()
    assert (counters.steps, counters.output_tokens, counters.preemptions, counters.aborted) == (0, 0, 0, 0)
    assert (counters.free_blocks, counters.cached_blocks, counters.used_blocks) == (16, 0, 0)
    assert counters.device.active_share is None
