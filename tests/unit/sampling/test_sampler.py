"""The sampler on logits with known probabilities."""

import math

import pytest
import torch
from torch import Tensor

from gapless.sampling.sampler import RowParams, Sampled, SampleInputs, Sampler
from gapless.sampling_params import SamplingParams
from simulation.solo import AmbiguousDrawError, draw, uniform_number

_CPU = torch.device("cpu")
# After L: x=2, y=1, z=0, rest -30.
X, Y, Z = 3, 5, 0
_VOCAB = 8
_ROW_L = [-30.0] * _VOCAB
_ROW_L[X], _ROW_L[Y], _ROW_L[Z] = 2.0, 1.0, 0.0


class _Case:
    """Rows with parameters, and sampling of any number of logits rows for them."""

    def __init__(self, *params: SamplingParams) -> None:
        self.params = params
        self.sampler = Sampler(max_rows=len(params), device=_CPU)
        self.sampler.set_rows(
            RowParams(
                rows=torch.arange(len(params)),
                temperature=torch.tensor([float(each.temperature) for each in params]),
                top_k=torch.tensor([each.top_k for each in params], dtype=torch.int32),
                top_p=torch.tensor([float(each.top_p) for each in params]),
                min_p=torch.tensor([float(each.min_p) for each in params]),
                seed=torch.tensor([each.seed or 0 for each in params]),
            )
        )

    def sample(
        self, rows: list[int], positions: list[int], logits: Tensor, masked: list[tuple[int, int]] | None = None
    ) -> Sampled:
        drawn = [sample for sample, row in enumerate(rows) if not self.params[row].greedy]
        pairs = torch.tensor(masked or [], dtype=torch.int64).reshape(-1, 2)
        return self.sampler.sample(
            logits.clone(),
            SampleInputs(
                rows=torch.tensor(rows),
                output_positions=torch.tensor(positions, dtype=torch.int32),
                random_samples=torch.tensor(drawn, dtype=torch.int64),
                masked_samples=pairs[:, 0],
                masked_tokens=pairs[:, 1],
                needs_filter=any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in self.params),
            ),
        )

    def draws(self, count: int) -> list[int]:
        """``count`` tokens of the first row on ROW-L."""
        tokens: list[int] = self.sample([0] * count, list(range(count)), torch.tensor([_ROW_L] * count)).tokens.tolist()
        return tokens


def _params(temperature: float, **options: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, seed=1234, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-45, 1e-30, 1e-6, 1e-5, 1e-4])
def test_c18_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert set(_Case(_params(temperature)).draws(50)) == {X}


@pytest.mark.parametrize(
    ("temperature", "shares"),
    [(0.5, (0.86681, 0.11731, 0.01588)), (1.0, (0.66524, 0.24473, 0.09003)), (2.0, (0.50648, 0.30720, 0.18632))],
)
def test_draws_have_the_tempered_shares(temperature: float, shares: tuple[float, ...]) -> None:
    count = 20_000
    tokens = _Case(_params(temperature)).draws(count)
    assert set(tokens) == {X, Y, Z}
    for token, share in zip((X, Y, Z), shares, strict=True):
        assert abs(tokens.count(token) / count - share) < 5 * math.sqrt(share * (1 - share) / count)


def test_an_endless_temperature_is_even() -> None:
    tokens = _Case(_params(3.4e38)).draws(8000)
    assert all(abs(tokens.count(token) / 8000 - 1 / _VOCAB) < 0.02 for token in range(_VOCAB))


@pytest.mark.parametrize("options", [{"top_p": 1e-4}, {"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1.0}])
def test_c18_filters_keep_at_least_one_token(options: dict[str, float]) -> None:
    assert set(_Case(_params(1.0, **options)).draws(50)) == {X}


def test_c20_top_k_2_never_gives_the_third() -> None:
    tokens = _Case(_params(1.0, top_k=2)).draws(2000)
    assert set(tokens) == {X, Y}


@pytest.mark.parametrize("top_k", [0, -1, _VOCAB, _VOCAB + 5, 10**6])
def test_c20_off_and_clamped_top_k_give_what_none_gives(top_k: int) -> None:
    assert _Case(_params(1.0, top_k=top_k)).draws(200) == _Case(_params(1.0)).draws(200)


def test_c20_a_mixed_batch_gives_each_its_own() -> None:
    params = [SamplingParams(temperature=0), _params(1.0, top_k=1), _params(1.0, top_k=_VOCAB + 5), _params(1.0)]
    case = _Case(*params)
    for position in range(50):
        tokens = case.sample([0, 1, 2, 3], [position] * 4, torch.tensor([_ROW_L] * 4)).tokens.tolist()
        alone = _Case(_params(1.0)).sample([0], [position], torch.tensor([_ROW_L])).tokens.tolist()
        assert tokens == [X, X, *alone * 2]


def test_c22_a_draw_does_not_depend_on_row_or_neighbours() -> None:
    mine = SamplingParams(temperature=1.0, seed=42)
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    alone = [_Case(mine).sample([0], [position], logits).tokens.item() for position in range(30)]
    others = [SamplingParams(temperature=1.0, seed=seed, top_k=5) for seed in range(3)]
    for place in range(4):
        params = [*others[:place], mine, *others[place:]]
        case = _Case(*params)
        for position in range(30):
            rows = [(place + i) % 4 for i in range(4)]
            tokens = case.sample(rows, [position, 1, 2, 3], logits.expand(4, -1)).tokens
            assert int(tokens[0]) == alone[position]


def test_c23_draws_of_a_request_differ_by_position_and_of_requests_by_seed() -> None:
    flat = torch.zeros(32, 100)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(2)]
    case = _Case(*params)
    first = case.sample([0] * 32, list(range(32)), flat).tokens.tolist()
    second = case.sample([1] * 32, list(range(32)), flat).tokens.tolist()
    assert len(set(first)) > 16
    assert first != second


def test_draws_are_those_of_double_precision() -> None:
    generator = torch.Generator().manual_seed(3)
    compared = 0
    for seed in range(200):
        params = SamplingParams(
            temperature=0.3 + seed % 5 / 3, top_k=seed % 7, top_p=1 - seed % 3 / 5, min_p=seed % 4 / 20, seed=seed
        )
        logits = torch.randn(1, 50, generator=generator) * 3
        try:
            expected = draw(logits[0].tolist(), params, uniform_number(seed, 9))
        except AmbiguousDrawError:
            continue
        assert _Case(params).sample([0], [9], logits).tokens.tolist() == [expected]
        compared += 1
    assert compared > 150


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens_are_never_sampled(temperature: float) -> None:
    case = _Case(_params(temperature), _params(temperature))
    for position in range(100):
        sampled = case.sample([0, 1], [position] * 2, torch.tensor([_ROW_L] * 2), masked=[(0, X), (0, Y), (1, Z)])
        first, second = sampled.tokens.tolist()
        assert first not in (X, Y)
        assert second != Z
        assert sampled.top.isfinite().tolist() == [True, True]
    assert temperature or (first, second) == (Z, X)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_c14_unhealthy_rows_are_marked_and_leave_the_others_alone(bad: float, temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(3)]
    logits = torch.tensor([_ROW_L, [bad] * _VOCAB, _ROW_L])
    sampled = _Case(*params).sample([0, 1, 2], [4, 4, 4], logits)
    clean = _Case(*params).sample([0, 1, 2], [4, 4, 4], torch.tensor([_ROW_L] * 3))

    assert sampled.top.isfinite().tolist() == [True, False, True]
    assert sampled.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert 0 <= int(sampled.tokens[1]) < _VOCAB, "the next step may embed it before anybody has looked"


def test_a_single_nan_is_unhealthy() -> None:
    logits = torch.tensor([_ROW_L])
    logits[0, Y] = torch.nan
    assert _Case(SamplingParams(temperature=0)).sample([0], [0], logits).top.isfinite().tolist() == [False]


def test_a_row_keeps_its_parameters_until_the_next_owner() -> None:
    case = _Case(_params(1.0, top_k=1), _params(1.0))
    assert set(case.draws(100)) == {X}
    case.sampler.set_rows(
        RowParams(
            rows=torch.tensor([0]),
            temperature=torch.tensor([1.0]),
            top_k=torch.tensor([0], dtype=torch.int32),
            top_p=torch.tensor([1.0]),
            min_p=torch.tensor([0.0]),
            seed=torch.tensor([1234]),
        )
    )
    assert case.draws(100) == _Case(_params(1.0)).draws(100)


def test_warm_up_changes_nothing() -> None:
    sampler = Sampler(max_rows=2, device=torch.device("cpu"))
    before = {name: value.clone() for name, value in vars(sampler).items() if isinstance(value, torch.Tensor)}

    sampler.warm_up(50)

    assert all(torch.equal(value, getattr(sampler, name)) for name, value in before.items())
