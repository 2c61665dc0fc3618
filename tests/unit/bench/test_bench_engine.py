"""Measuring a real engine, with a small random model on the CPU."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from gapless.bench.comparison import compare_depths
from gapless.bench.figures import RunFigures
from gapless.bench.measured_engine import MeasuredEngine
from gapless.bench.plan import Plan
from gapless.bench.progress import BenchProgress
from gapless.bench.step_figures import least_bytes
from gapless.bench.workloads import Lengths, Workload, synthetic_workload
from gapless.config import EngineConfig
from gapless.engine.request import EngineRequest
from gapless.sampling_params import SamplingParams
from gapless.timeline.spans import DeviceLimits

CONFIG = EngineConfig(
    device="cpu", load_format="dummy", max_rows=4, max_model_len=64, num_blocks=64, enable_prefix_caching=False
)
LIMITS = DeviceLimits(device_name="a device", weight_bytes=1000, kv_bytes_per_token=10, read_bytes_per_s=None)


def workload_of(requests: int = 3, *, streams: bool = False, new: int = 6, spread: float = 0.0) -> Workload:
    return synthetic_workload(
        requests=requests,
        prompt=Lengths(mean=10, spread=spread),
        new=Lengths(mean=new, spread=spread),
        vocab_size=320,
        streams=streams,
    )


def run(workload: Workload, *, depth: int = 2, config: EngineConfig = CONFIG) -> RunFigures:
    with MeasuredEngine("tiny-llama", replace(config, depth=depth)) as engine:
        return engine.run(workload, repeat=1)


def test_a_run_has_figures_of_its_steps_and_requests() -> None:
    found = run(workload_of())
    assert (found.num_output_tokens, found.num_prompt_tokens) == (18, 30)
    assert found.num_steps == found.steps.num_steps == 6  # a prefill of 30 tokens, and 5 decode steps
    assert found.steps.decode_steps == 5
    assert len(found.steps.periods_s) == 5
    assert found.has_fixed_steps
    assert 0 < found.busy_s <= found.window_s
    assert 0 < found.active_share <= 1
    assert found.steps.decode_elapsed_s > 0
    assert found.steps.decode_host_s
    assert set(found.steps.host_s) == {"schedule", "write", "enqueue", "wait", "apply"}
    # Busy and idle time by cause are all the time there is.
    assert sum(found.steps.idle_s.values()) + found.busy_s == pytest.approx(found.window_s, rel=0.2)
    for request in found.requests:
        assert 0 < request.ttft_s <= request.end_to_end_s <= found.seconds
        assert request.tpot_s is not None
        assert request.itl_s == ()


def test_figures_are_those_of_the_run_alone() -> None:
    with MeasuredEngine("tiny-llama", CONFIG) as engine:
        first = engine.run(workload_of(), repeat=1)
        second = engine.run(workload_of(), repeat=2)
    assert (first.num_steps, first.steps.num_steps) == (second.num_steps, second.steps.num_steps)
    assert first.steps.read_bytes == second.steps.read_bytes
    assert first.token_ids == second.token_ids
    assert first.steps_digest == second.steps_digest
    assert (first.repeat, second.repeat) == (1, 2)


def test_streamed_requests_have_a_time_for_each_token() -> None:
    found = run(workload_of(streams=True))
    assert [len(request.itl_s) for request in found.requests] == [5, 5, 5]
    assert len(found.times_s("itl_s")) == 15
    for request in found.requests:
        assert request.ttft_s + sum(request.itl_s) == pytest.approx(request.end_to_end_s, abs=0.05)


def test_steps_have_the_same_shapes_at_every_depth() -> None:
    runs = [run(workload_of(6, spread=0.5), depth=depth) for depth in (1, 2, 3)]
    assert len({found.steps_digest for found in runs}) == 1
    assert len({found.token_ids for found in runs}) == 1
    assert run(workload_of(5, spread=0.5)).steps_digest != runs[0].steps_digest


def test_a_cache_that_is_too_small_shows_as_preemptions() -> None:
    tight = run(workload_of(4, new=30), config=replace(CONFIG, num_blocks=6))
    assert tight.preemptions > 0
    assert not tight.has_fixed_steps


def test_what_was_read_is_at_least_what_must_be() -> None:
    with MeasuredEngine("tiny-llama", CONFIG) as engine:
        workload = workload_of(5, spread=0.5)
        found = engine.run(workload, repeat=1)
        assert 0 < engine.least_bytes(workload) <= found.steps.read_bytes
        assert engine.read_bytes_per_s > 0


def test_the_least_a_workload_must_read() -> None:
    workload = workload_of(2, new=3)
    # 3 steps read the weights; each of the two requests reads contexts of 11 and 12 tokens.
    assert least_bytes(workload, LIMITS, max_rows=8) == 3 * 1000 + 2 * (11 + 12) * 10
    # One row: 6 steps.
    assert least_bytes(workload, LIMITS, max_rows=1) == 6 * 1000 + 2 * (11 + 12) * 10
    # Layers with a window of 4, which are 6 of the 10 bytes.
    windowed = replace(LIMITS, window=4, window_kv_bytes_per_token=6)
    assert least_bytes(workload, windowed, max_rows=8) == 3 * 1000 + 2 * ((11 + 12) * 4 + 2 * 4 * 6)


def test_a_request_that_ends_early_is_known_to() -> None:
    plain = run(workload_of(1, new=5))
    stop = plain.token_ids[0][2]
    request = EngineRequest(
        prompt_token_ids=workload_of(1).requests[0].prompt_token_ids,
        params=SamplingParams(temperature=0.0, max_tokens=5),
        stop_token_ids=frozenset({stop}),
    )
    found = run(Workload(name="stops", requests=(request,), ends_by_length=False))
    assert found.num_output_tokens == plain.token_ids[0].index(stop) + 1
    assert not found.has_fixed_steps


def test_depths_are_compared_in_every_round() -> None:
    workloads = (workload_of(1), workload_of(3))
    plan = Plan(model="tiny-llama", config=CONFIG, depths=(1, 3), workloads=workloads, repeats=2)
    with BenchProgress(quiet=True) as progress:
        comparison = compare_depths(plan, progress)
    assert len(comparison.runs) == 8
    assert [len(comparison.runs_of(depth, w.name)) for depth in (1, 3) for w in workloads] == [2, 2, 2, 2]
    order = list(dict.fromkeys((run.repeat, run.depth) for run in comparison.runs))
    assert order == [(n, depth) for n, depths in enumerate(plan.rounds(), 1) for depth in depths]
    assert comparison.difference is None
    assert comparison.must_agree
    assert comparison.floor_s(workloads[1].name) > comparison.floor_s(workloads[0].name) > 0


def test_progress_is_told_while_a_run_goes_on() -> None:
    shares: list[float] = []
    with MeasuredEngine("tiny-llama", CONFIG) as engine:
        engine.run(workload_of(4, new=50).shortened(50), repeat=1, progress=shares.append)
        assert engine.counters().output_tokens == 200
    assert shares == sorted(shares)
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_shown_on_terminals_only(terminal: bool) -> None:
    console = Console(file=StringIO(), force_terminal=terminal, force_interactive=terminal, width=80)
    with BenchProgress(console) as progress:
        progress.stage("depth 2: warm up")
        tell = progress.share_callback
        assert (tell is not None) == terminal
        if tell is not None:
            tell(0.5)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert ("depth 2: warm up" in shown) == ("50%" in shown) == terminal
    assert (shown == "") != terminal
