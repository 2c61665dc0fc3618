"""Counter-based uniform numbers: a function of seed and position, and as good as random."""

import math

import torch

from gapless.sampling.random_numbers import uniform
from simulation.solo import uniform_number


def _numbers(seeds: list[int], positions: list[int]) -> list[float]:
    drawn = uniform(torch.tensor(seeds), torch.tensor(positions, dtype=torch.int32))
    assert drawn.dtype == torch.float64
    numbers: list[float] = drawn.tolist()
    return numbers


def test_they_are_those_of_plain_integer_arithmetic() -> None:
    seeds = [0, 1, -1, 7, 2**63 - 1, -(2**63), 123456789012345]
    for position in (0, 1, 2, 1000, 2**31 - 1):
        expected = [uniform_number(seed % 2**64, position) for seed in seeds]
        assert _numbers(seeds, [position] * len(seeds)) == expected


def test_the_first_numbers_of_seed_7_stay_the_same_for_ever() -> None:
    """Changing the function would change the outputs of every seeded request out there."""
    expected = [0.7215081806049702, 0.6497043364684557, 0.5493743249193239]
    assert _numbers([7, 7, 7], [0, 1, 2]) == expected


def test_c22_a_number_depends_on_its_own_seed_and_position_only() -> None:
    alone = _numbers([42], [5])
    assert _numbers([1, 42, 3, 42], [0, 5, 5, 6])[1] == alone[0]
    assert len(set(_numbers([42] * 100, list(range(100))))) == 100
    assert len(set(_numbers(list(range(100)), [0] * 100))) == 100


def test_numbers_are_spread_evenly() -> None:
    count = 200_000
    for seeds, positions in (
        (torch.arange(count), torch.zeros(count, dtype=torch.int32)),
        (torch.full((count,), 3), torch.arange(count, dtype=torch.int32)),
    ):
        numbers = uniform(seeds, positions)
        assert 0 <= float(numbers.min()) < 1e-4
        assert 1 - 1e-4 < float(numbers.max()) < 1
        # Mean of uniform numbers: 1/2 with a standard deviation of sqrt(1/12 / n); five of them are allowed.
        assert abs(float(numbers.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)
        counts = torch.histc(numbers.to(torch.float32), bins=50, min=0, max=1)
        chi_squared = float(((counts - count / 50) ** 2 / (count / 50)).sum())
        assert 20 < chi_squared < 100, "49 degrees of freedom"


def test_neighbouring_seeds_and_positions_are_not_correlated() -> None:
    count = 50_000
    seeds = torch.arange(count)
    first = uniform(seeds, torch.zeros(count, dtype=torch.int32))
    for other in (
        uniform(seeds + 1, torch.zeros(count, dtype=torch.int32)),
        uniform(seeds, torch.ones(count, dtype=torch.int32)),
        # One stream must not be its neighbour's shifted by one.
        uniform(seeds - 1, torch.ones(count, dtype=torch.int32)),
    ):
        correlation = float(torch.corrcoef(torch.stack([first, other]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(count)
