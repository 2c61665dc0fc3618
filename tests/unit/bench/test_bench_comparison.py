"""What is made of runs: whether tokens differ and may, medians, and the depth that is recommended."""

import pytest

from gapless.bench.comparison import Comparison, TokensDifferError
from gapless.bench.figures import median_of, percentile
from gapless.bench.plan import Plan, make_plan
from gapless.bench.summary import summaries
from gapless.bench.verdict import tokens_verdict, verdict
from gapless.bench.workloads import Lengths, Workload, synthetic_workload
from gapless.config import EngineConfig
from gapless.errors import ConfigError
from unit.bench.made_runs import made_comparison, made_run, made_workload

OTHER = ((1, 2, 3), (4, 9, 6))


def words(comparison: Comparison) -> str:
    return " ".join(verdict(comparison, comparison.plan.workloads[0]).lines)


def plan_of(depths: tuple[int, ...] = (1, 2, 3), repeats: int = 6, seed: int = 0) -> Plan:
    return Plan(
        model="m",
        config=EngineConfig(),
        depths=depths,
        workloads=(made_workload(),),
        repeats=repeats,
        seed=seed,
    )


def test_percentiles_are_values_that_were_seen() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, p) for p in (1, 20, 50, 90, 100)] == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert percentile([], 50) is None
    assert median_of([None, 2.0, 4.0]) == 3.0
    assert median_of([None]) is None


def test_depths_take_turns_in_running_first() -> None:
    rounds = plan_of().rounds()
    assert all(sorted(depths) == [1, 2, 3] for depths in rounds)
    for place in range(3):
        assert sorted(depths[place] for depths in rounds) == [1, 1, 2, 2, 3, 3]
    assert rounds == plan_of().rounds()
    assert len({tuple(plan_of(seed=seed).rounds()[0]) for seed in range(20)}) > 3


@pytest.mark.parametrize(
    ("depths", "repeats", "message"),
    [
        ((), 1, "no depth"),
        ((2, 2), 1, "depth=2 2"),
        ((0,), 1, "depth=0"),
        ((17,), 1, "depth=17"),
        ((1,), 0, "repeats=0"),
    ],
)
def test_impossible_plans_are_refused(depths: tuple[int, ...], repeats: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(depths, repeats)


def test_a_plan_has_room_for_its_workloads() -> None:
    def made(workloads: list[Workload], context: int = 4096, max_rows: int | None = None) -> EngineConfig:
        return make_plan(
            model="m",
            context=context,
            workloads=workloads,
            depths=[1],
            repeats=1,
            seed=0,
            max_rows=max_rows,
            max_model_len=None,
            engine={"block_size": 16},
        ).config

    def workload(requests: int, tokens: int) -> Workload:
        return synthetic_workload(requests=requests, prompt=Lengths(mean=tokens), new=Lengths(mean=10), vocab_size=50)

    config = made([workload(3, 20), workload(5, 8)])
    assert (config.max_rows, config.max_model_len) == (5, 46)
    assert made([workload(3, 20)], context=31).max_model_len == 31
    assert made([workload(3, 20)], max_rows=2).max_rows == 2
    with pytest.raises(ConfigError, match="max_rows=0"):
        made([workload(3, 20)], max_rows=0)
    with pytest.raises(ConfigError, match="is there twice"):
        made([workload(3, 20), workload(3, 20)])


def test_equal_tokens_are_said_to_be_equal() -> None:
    comparison = made_comparison(made_run(1, 2.0), made_run(2, 1.0))
    assert comparison.difference is None
    comparison.check_tokens()
    assert tokens_verdict(comparison) == "All 2 runs gave the same tokens."


def test_a_difference_is_named_and_owed_where_steps_are_fixed() -> None:
    comparison = made_comparison(made_run(1, 2.0), made_run(2, 1.0, token_ids=OTHER))
    assert str(comparison.difference) == "depth 1 and depth 2 differ in request 1 at output position 1"
    assert comparison.must_agree
    assert tokens_verdict(comparison).startswith("FAILED: depth 1 and depth 2 differ in request 1")
    with pytest.raises(TokensDifferError, match="request 1 at output position 1, and they owe the same tokens"):
        comparison.check_tokens()


def test_a_shorter_output_differs_where_it_ends() -> None:
    comparison = made_comparison(made_run(2, 2.0), made_run(1, 1.0, token_ids=((1, 2, 3), (4, 5))))
    assert comparison.difference is not None
    assert comparison.difference.position == 2


@pytest.mark.parametrize("why", [{"ended_by_length": False}, {"preemptions": 1}])
def test_depths_whose_steps_had_other_shapes_need_not_agree(why: dict[str, bool]) -> None:
    other = made_run(2, 1.0, token_ids=OTHER, digest="other", **why)  # type: ignore[arg-type]
    comparison = made_comparison(made_run(1, 2.0), other)
    assert not comparison.must_agree
    assert "That is no fault by itself" in tokens_verdict(comparison)
    comparison.check_tokens()
    same_shapes = made_comparison(made_run(1, 2.0), made_run(2, 1.0, token_ids=OTHER, **why))  # type: ignore[arg-type]
    assert same_shapes.must_agree


def test_runs_of_one_depth_are_compared_too() -> None:
    comparison = made_comparison(made_run(2, 1.0), made_run(2, 1.0, repeat=2, token_ids=OTHER))
    assert str(comparison.difference) == "two runs of depth 2 differ in request 1 at output position 1"


def test_a_summary_takes_medians_and_spread() -> None:
    comparison = made_comparison(
        made_run(1, 4.0), made_run(1, 2.0, repeat=2, busy=0.5), made_run(1, 3.0, repeat=3, preemptions=2)
    )
    [summary] = summaries(comparison, comparison.plan.workloads[0])
    assert (summary.seconds, summary.fastest_s, summary.slowest_s) == (3.0, 2.0, 4.0)
    assert summary.spread == pytest.approx(2 / 3)
    assert summary.output_tokens_per_s == 2.0
    assert summary.total_tokens_per_s == pytest.approx(14 / 3)
    assert summary.step_p50_s == pytest.approx(0.3)
    assert summary.step_p99_s == pytest.approx(0.4)
    assert summary.active_share == 0.9
    assert summary.roofline_share == pytest.approx(0.5)
    assert summary.steps_floor_s == pytest.approx(0.5)
    assert summary.host_step_s == pytest.approx(0.001)
    assert list(summary.idle_shares) == ["enqueue", "apply"]
    assert summary.idle_shares["enqueue"] == pytest.approx(0.1)
    assert summary.preemptions == 2
    assert (summary.ttft.p50_s, summary.ttft.p99_s) == (pytest.approx(0.1), pytest.approx(0.2))


def test_a_depth_that_is_faster_in_every_round_is_recommended() -> None:
    rounds = [run for i in (1, 2, 3) for run in (made_run(1, 2.0 + i / 10, repeat=i), made_run(2, 1.8, repeat=i))]
    comparison = made_comparison(*rounds, *(made_run(3, 1.8, repeat=i) for i in (1, 2, 3)))
    found = verdict(comparison, comparison.plan.workloads[0])
    assert found.depth == 2
    assert "Depth 2 is 1.22x depth 1: 1.80 s against 2.20 s." in found.lines
    assert any(line.startswith("Depth 3 adds nothing to depth 2 (1.000x") for line in found.lines)
    assert "Use depth 2 for this workload." in found.lines
    assert "Time to first token, median: 100.0 ms at depth 1, 100.0 ms at depth 2, 100.0 ms at depth 3." in found.lines


def test_a_depth_that_is_faster_only_sometimes_is_not() -> None:
    comparison = made_comparison(
        made_run(1, 2.0), made_run(2, 1.5), made_run(1, 2.0, repeat=2), made_run(2, 2.1, repeat=2)
    )
    assert verdict(comparison, comparison.plan.workloads[0]).depth == 1
    assert "Depth 2 adds nothing that stands out of the noise to depth 1" in words(comparison)


def test_a_slower_depth_is_called_so() -> None:
    assert "Depth 2 is slower than depth 1 (0.80x)." in words(made_comparison(made_run(1, 2.0), made_run(2, 2.5)))


def test_who_sets_the_pace_is_told() -> None:
    device = words(made_comparison(made_run(1, 2.0, host_s=0.05)))
    assert device.startswith("Device-bound at depth 1: a step takes the host 50.00 ms and the device 180.00 ms;")
    assert "idle for: enqueue 10.0%" in device
    assert words(made_comparison(made_run(1, 2.0, busy=0.2, host_s=0.15))).startswith("Host-bound at depth 1")
    late = words(made_comparison(made_run(2, 2.0, busy=0.4, host_s=0.001)))
    assert late.startswith("Host-bound at depth 2: a step takes the host 1.00 ms and the device 80.00 ms;")


def test_the_floor_is_told_in_seconds() -> None:
    text = words(made_comparison(made_run(1, 2.0)))
    assert "needs 250.0 ms to read what the workload must read at least (at 1 GB/s, measured)" in text
    assert "depth 1 took 8.00x that. The 10 steps that ran need 500.0 ms." in text


def test_preemptions_are_told() -> None:
    assert "up to 3 preemptions a run" in words(made_comparison(made_run(1, 2.0, preemptions=3)))


def test_one_round_is_called_one_round() -> None:
    assert "There was one round" in words(made_comparison(made_run(1, 2.0), made_run(2, 1.0)))
    several = made_comparison(*(made_run(d, 1.0 / d, repeat=i) for i in (1, 2) for d in (1, 2)))
    assert "There was one round" not in words(several)
