"""2,000 seeds of the simulation, in groups that test processes can share; `make simulate SEEDS=n` runs more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.__main__ import FAILED_SEED, run_seeds
from simulation.harness import SimulationError, run
from simulation.hash_model import HashModel

_NUM_SEEDS = 2000
_GROUP = 50
_TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("start", range(0, _NUM_SEEDS, _GROUP), ids=lambda start: f"seeds-{start}-{start + _GROUP - 1}")
def test_seeds_give_what_each_request_gives_alone(start: int) -> None:
    outcome = run_seeds(start, _GROUP)

    assert not isinstance(outcome, str), outcome
    assert len(outcome) == _GROUP


def test_the_workloads_come_across_everything_they_are_made_for() -> None:
    summaries = [run(seed) for seed in range(60)]

    for what in ("preemptions", "cached_tokens", "aborted", "stopped", "failed", "dropped_rows"):
        assert sum(getattr(summary, what) for summary in summaries) > 5, what


def test_a_run_is_a_function_of_its_seed() -> None:
    assert [run(seed) for seed in range(10)] == [run(seed) for seed in range(10)]


def test_a_failure_names_its_seed_and_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HashModel.forward
    monkeypatch.setattr(HashModel, "forward", lambda model, inputs: -right(model, inputs))

    with pytest.raises(SimulationError, match=r"seed 4: AuditError: .*\n.*--start 4 --seeds 1"):
        run(4)


def test_the_command_prints_what_it_did() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "simulation", "--seeds", "3", "--start", "7"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=_TESTS,
        check=False,
    )

    assert done.returncode == 0 != FAILED_SEED
    assert re.search(r"3 seeds are right \(\d+ a second\): \d+ steps", done.stdout)
