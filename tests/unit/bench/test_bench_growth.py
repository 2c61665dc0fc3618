"""The table of decode steps: what its steps look like to the device, and which cells are left out."""

from collections.abc import Iterator

import pytest
import torch

from gapless.bench.growth import Growth, GrowthPlan, StepDriver, measure_growth
from gapless.bench.progress import BenchProgress
from gapless.bench.verdict import growth_lines
from gapless.config import EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.results import RequestUpdate
from gapless.errors import ConfigError, EngineDeadError
from gapless.pipeline.device_step import DeviceStep
from gapless.timeline.spans import DeviceLimits

CONFIG = EngineConfig(device="cpu", load_format="dummy", max_rows=3, num_blocks=40)
PLAN = GrowthPlan(model="tiny-llama", config=CONFIG, requests=(1, 3), contexts=(20, 200, 600, 4000), steps=4)
LIMITS = DeviceLimits(device_name="a device", weight_bytes=1000, kv_bytes_per_token=10, read_bytes_per_s=None)


class Nobody:
    def publish(self, updates: list[RequestUpdate]) -> None:
        assert not updates

    def engine_died(self, error: EngineDeadError) -> None:
        raise error


@pytest.fixture
def built() -> Iterator[BuiltEngine]:
    engine = build_engine("tiny-llama", CONFIG, Nobody())
    yield engine
    engine.engine.shutdown()


@pytest.fixture(scope="module")
def growth() -> Growth:
    with BenchProgress(quiet=True) as progress:
        return measure_growth(PLAN, progress)


def test_every_cell_is_measured_or_says_why_not(growth: Growth) -> None:
    states = {(cell.requests, cell.context): cell.state for cell in growth.cells}
    assert states == {
        (1, 20): "run",
        (1, 200): "run",
        (1, 600): "run",
        (1, 4000): "beyond the context",
        (3, 20): "run",
        (3, 200): "run",
        (3, 600): "does not fit",  # 114 of 40 blocks
        (3, 4000): "beyond the context",
    }
    for cell in growth.cells:
        assert (cell.device_s is not None) == (cell.roofline_share is not None) == (cell.state == "run")
        assert cell.num_steps == (4 if cell.state == "run" else 0)
    assert set(growth.host_s) == {1, 3}
    assert all(seconds for seconds in growth.host_s.values())
    assert growth.kv_capacity == 640


def test_a_step_reads_blocks_of_its_own(built: BuiltEngine) -> None:
    StepDriver(built, PLAN).measure(3, 200, LIMITS, 1e9)
    assert isinstance(built.executor, DeviceStep)
    blocks = built.executor.block_tables[:3, :13].flatten().tolist()
    assert sorted(blocks) == list(range(1, 40))
    assert blocks != sorted(blocks)
    assert not built.executor.block_tables[3].any(), "the reserved row keeps its reserved block"


def test_a_step_attends_to_the_whole_context_and_samples(built: BuiltEngine) -> None:
    """A value that is not finite in a row's oldest block shows in what that row samples, and in no other row's."""
    driver = StepDriver(built, PLAN)
    assert isinstance(built.executor, DeviceStep)
    # A small random model likes to repeat its input, which the step carries over from here.
    built.executor.last_tokens[:3] = torch.tensor([7, 8, 9])
    driver.measure(3, 200, LIMITS, 1e9)
    sampled = built.executor.last_tokens[:3].tolist()
    assert all(sampled)
    oldest = int(built.executor.block_tables[1, 0])
    for values in built.kv.values:
        values[oldest * CONFIG.block_size : (oldest + 1) * CONFIG.block_size] = torch.nan
    driver.measure(3, 200, LIMITS, 1e9)
    assert built.executor.last_tokens[:3].tolist() == [sampled[0], 0, sampled[2]]


def test_the_floor_of_a_cell_is_weights_and_contexts(built: BuiltEngine) -> None:
    cell = StepDriver(built, PLAN).measure(3, 20, LIMITS, 1e9)
    assert cell.floor_s == pytest.approx((1000 + 3 * 20 * 10) / 1e9)


def test_a_step_beyond_the_budget_is_not_run(built: BuiltEngine) -> None:
    hurried = GrowthPlan(model="tiny-llama", config=CONFIG, requests=(1,), contexts=(20,), steps=4, budget_s=1e-9)
    assert StepDriver(built, hurried).measure(1, 20, LIMITS, 1e9).state == "not run"


def test_what_the_table_says(growth: Growth) -> None:
    lines = growth_lines(growth)
    assert lines[0].startswith("The KV cache holds 640 tokens.")
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requests": ()}, "requests="),
        ({"requests": (0,)}, "requests=0"),
        ({"contexts": (16, -1)}, "contexts=16 -1"),
        ({"steps": 0}, "steps=0"),
        ({"budget_s": 0.0}, "budget_s=0"),
    ],
)
def test_impossible_plans_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrowthPlan(**({"model": "m", "config": CONFIG, "requests": (1,), "contexts": (16,)} | options))  # type: ignore[arg-type]
