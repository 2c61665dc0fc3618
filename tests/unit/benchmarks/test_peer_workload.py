"""The common workload of the peer benchmarks, and how a decode step's time is read from marks."""

import argparse

import pytest
from workload import STRETCH, Mark, Workload, add_workload_arguments, median_step_ms


def parsed(*options: str) -> Workload:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    return Workload.from_arguments(parser.parse_args(options))


def test_the_default_is_bf16_on_a_gpu_and_fp32_on_a_cpu() -> None:
    assert parsed().dtype == "bfloat16"
    assert parsed("--device", "cpu").dtype == "float32"
    assert parsed("--device", "cpu", "--dtype", "bfloat16").dtype == "bfloat16"


def test_mean_context_chooses_the_prompt() -> None:
    short = parsed("--new-tokens", "200", "--mean-context", "1000")
    assert short.prompt + short.new_tokens / 2 == 1000
    assert short.context == 1100


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(SystemExit, match="prompt=-4"):
        parsed("--new-tokens", "200", "--mean-context", "96")
    with pytest.raises(SystemExit, match="requests=0"):
        parsed("--requests", "0")


def test_prompts_repeat_and_share_no_prefix() -> None:
    workload = parsed("--requests", "8", "--prompt", "50", "--seed", "3")
    prompts = workload.prompts()
    assert prompts == workload.prompts()
    assert [len(prompt) for prompt in prompts] == [50] * 8
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 8
    assert prompts != parsed("--requests", "8", "--prompt", "50", "--seed", "4").prompts()


def test_the_median_step_is_that_of_stretches_between_the_two_moments() -> None:
    # Steps of 10 ms, except for a slow beginning, a slow end, and one stretch in the middle that hung for a second.
    marks, now = [], 0.0
    for step in range(8 * STRETCH):
        slow = step < STRETCH or step >= 7 * STRETCH
        now += 0.5 if slow else 0.010
        now += 1.0 if step == 4 * STRETCH else 0.0
        marks.append(Mark(time_s=now, steps=step))
    found = median_step_ms(marks, begin_s=marks[STRETCH].time_s, end_s=marks[7 * STRETCH - 1].time_s)
    assert found == pytest.approx(10.0)


def test_a_short_run_is_one_stretch_and_none_at_all_is_none() -> None:
    marks = [Mark(time_s=0.02 * step, steps=2 * step) for step in range(10)]
    assert median_step_ms(marks, begin_s=0.0, end_s=1.0) == pytest.approx(10.0)
    assert median_step_ms(marks, begin_s=1.0, end_s=0.0) is None
    assert median_step_ms(marks[:1], begin_s=0.0, end_s=1.0) is None


def test_sampled_marks_may_hold_several_steps_or_none() -> None:
    # Read 50 times a second while a step takes 7 ms: two or three steps a mark, of which the time is known to a step.
    marks = [Mark(time_s=0.020 * i, steps=(0.020 * i) // 0.007) for i in range(500)]
    assert median_step_ms(marks, begin_s=0.0, end_s=10.0) == pytest.approx(7.0, rel=0.01)
