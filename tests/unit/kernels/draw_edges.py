"""Rows of logits at the edges of sampling, each with the token that must come of it: :func:`edge_rows`.

What is right follows from how a row was made, not from the plain version, which is held to it as well: filters in the
order top_k, top_p, min_p; ties with the k-th token stay; at the edge of top_p lower ids come first; the draw inverts
the cumulative distribution in the order of ids. A row that is not all numbers, or has an infinite one at its top, gets
any token of the vocabulary and is told apart by its largest logit; its neighbours feel nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gapless.engine.device_kernels import DeviceKernels
from gapless.sampling.drawing import Draw
from gapless.sampling.sampler import Largest, RowParams, SampleInputs, Sampler

INF, NAN = math.inf, math.nan
LARGEST_FLOAT = torch.finfo(torch.float32).max
NEARLY_ONE = 1 - 2.0**-53


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeRow:
    """A row, its parameters, and the tokens that may come of it."""

    name: str
    logits: Tensor
    expected: range
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    number: float = 0.5


def edge_rows(vocab_size: int) -> list[EdgeRow]:
    """All of them; those that are not numbers stand between the others."""
    good = [*lone_rows(vocab_size), *few_rows(vocab_size), *equal_rows(vocab_size), *ranked_rows(vocab_size)]
    good += extreme_rows(vocab_size)
    sick = sick_rows(vocab_size)
    for at, row in enumerate(sick):
        good.insert(1 + at * len(good) // len(sick), row)
    return good


def only(vocab_size: int, values: dict[int, float], *, rest: float = -INF) -> Tensor:
    """A row with a few logits, all others ``rest``."""
    row = torch.full((vocab_size,), rest)
    for token, value in values.items():
        row[token] = value
    return row


def token(at: int) -> range:
    """This one alone."""
    return range(at, at + 1)


def lone_rows(vocab_size: int) -> list[EdgeRow]:
    """One token is left, whatever is asked for."""
    rows = []
    for at in (0, vocab_size // 2 + 1, vocab_size - 1):
        plain = EdgeRow(name=f"only token {at}", logits=only(vocab_size, {at: -3.0}), expected=token(at))
        rows += [
            replace(plain, number=0.0),
            replace(plain, number=NEARLY_ONE, temperature=100.0),
            replace(plain, top_k=1),
            replace(plain, top_k=vocab_size, top_p=0.5),
            replace(plain, top_p=1e-9, number=NEARLY_ONE),
            replace(plain, min_p=1.0, temperature=1e-30),
        ]
    return rows


def few_rows(vocab_size: int) -> list[EdgeRow]:
    """Two or five tokens are left, far from each other."""
    a, b = vocab_size // 3, vocab_size - 2
    two = EdgeRow(name="two equal", logits=only(vocab_size, {a: 7.0, b: 7.0}), expected=token(a))
    rows = [
        each
        for number, at in ((0.0, a), (0.25, a), (0.75, b), (NEARLY_ONE, b))
        for each in (
            replace(two, number=number, expected=token(at)),
            replace(two, number=number, expected=token(at), top_k=1),  # a tie with the k-th stays
            replace(two, number=number, expected=token(at), min_p=1.0),
            replace(two, number=number, expected=token(at), top_p=0.6),
            replace(two, number=number, expected=token(a), top_p=0.5),
            replace(two, number=number, expected=token(a), top_p=1e-9),
        )
    ]
    # 0.119 and 0.881 of the mass.
    unequal = EdgeRow(name="two unequal", logits=only(vocab_size, {a: 0.0, b: 2.0}), expected=token(b), number=0.05)
    rows += [
        replace(unequal, expected=token(a)),
        replace(unequal, number=0.2),
        replace(unequal, top_k=1),
        replace(unequal, top_k=2, expected=token(a)),
        replace(unequal, top_p=0.8),
        replace(unequal, top_p=0.9, expected=token(a)),
        replace(unequal, min_p=0.2),
        replace(unequal, min_p=0.1, expected=token(a)),
        replace(unequal, temperature=1e-30),
    ]
    places = [vocab_size * i // 5 + 1 for i in range(5)]
    five = EdgeRow(name="five equal", logits=only(vocab_size, dict.fromkeys(places, 1.0)), expected=token(places[0]))
    for nth, at in enumerate(places):
        number = (nth + 0.5) / 5
        rows += [replace(five, number=number, expected=token(at), top_k=k) for k in (0, 3, 10)]
        rows += [replace(five, number=(nth + 0.5) / 3, expected=token(at), top_p=0.5)] if nth < 3 else []
    return rows


def equal_rows(vocab_size: int) -> list[EdgeRow]:
    """All logits are equal."""
    row = EdgeRow(name="all equal", logits=torch.full((vocab_size,), -1.5), expected=token(0))
    rows = [
        replace(row, number=(at + 0.5) / vocab_size, expected=token(at), **filters)
        for at in (0, vocab_size // 2, vocab_size - 1)
        for filters in (
            {},
            {"top_k": 1},
            {"top_k": vocab_size},
            {"top_k": 2**31 - 1},
            {"min_p": 1.0},
            {"temperature": 1e-30},
            {"temperature": 1e30},
        )
    ]
    # The plain version adds up fp32 numbers to find the quarter, so its end is not sharp.
    middle, slack = vocab_size // 8, 2 + vocab_size // 500
    rows += [
        replace(row, top_p=1e-9, number=NEARLY_ONE),
        replace(row, top_k=1, top_p=1e-9, min_p=1.0, number=NEARLY_ONE),
        replace(row, top_p=0.25, expected=range(middle - slack, middle + slack)),
        replace(row, logits=torch.full((vocab_size,), LARGEST_FLOAT), top_p=1e-9),
        replace(row, logits=torch.full((vocab_size,), -LARGEST_FLOAT), top_p=1e-9),
    ]
    return rows


def ranked_rows(vocab_size: int) -> list[EdgeRow]:
    """No two of the likely tokens are equal, and each is a quarter less than the one before it; ids are shuffled."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    logits = torch.empty(vocab_size)
    logits[order] = -0.25 * torch.arange(vocab_size).clamp(max=120)
    ranked = [int(at) for at in order[:120]]
    row = EdgeRow(name="ranked", logits=logits, expected=token(ranked[0]), number=NEARLY_ONE)
    rows = [
        replace(row, top_k=1),
        replace(row, top_k=1, temperature=1e30),
        replace(row, top_p=1e-9),
        replace(row, min_p=1.0),
        replace(row, temperature=1e-30),
        replace(row, temperature=1e-30, top_k=vocab_size),
    ]
    for rank in (0, 4):
        whole = number_of(logits, ranked, ranked[rank])
        rows += [
            replace(row, number=whole, expected=token(ranked[rank]), top_k=k)
            for k in (0, vocab_size - 1, vocab_size, 2**31 - 1)
        ]
        # exp(-5 / 4) is 0.287 and exp(-6 / 4) is 0.223; six tokens have 0.78 of the mass, seven have 0.83.
        six = number_of(logits, ranked[:6], ranked[rank])
        rows += [
            replace(row, number=six, expected=token(ranked[rank]), **filters)
            for filters in ({"top_k": 6}, {"min_p": 0.25}, {"top_p": 0.75}, {"top_k": 6, "top_p": 0.98, "min_p": 0.1})
        ]
    three = sorted(ranked[:3])
    rows += [
        replace(row, temperature=1e30, top_k=3, number=(nth + 0.5) / 3, expected=token(at))
        for nth, at in enumerate(three)
    ]
    return rows


def extreme_rows(vocab_size: int) -> list[EdgeRow]:
    """Differences beyond fp32, and tokens whose probability is zero in it."""
    at, other = vocab_size - 1, 1
    row = EdgeRow(name="extreme", logits=only(vocab_size, {at: LARGEST_FLOAT}, rest=-LARGEST_FLOAT), expected=token(at))
    far = replace(row, logits=only(vocab_size, {other: -200.0, at: 0.0}))
    return [
        replace(each, number=number, top_p=top_p)
        for each in (row, replace(row, logits=only(vocab_size, {at: LARGEST_FLOAT}, rest=0.0)), far)
        for number in (0.0, NEARLY_ONE)
        for top_p in (1.0, 0.9)
    ]


def sick_rows(vocab_size: int) -> list[EdgeRow]:
    """Nothing can be drawn from these; any token will do, and the row is told apart by its largest logit."""
    kinds = {
        "all NaN": torch.full((vocab_size,), NAN),
        "NaN at the end": only(vocab_size, {vocab_size - 1: NAN}, rest=1.0),
        "NaN at the start": only(vocab_size, {0: NAN}),
        "+inf": only(vocab_size, {vocab_size // 2: INF}, rest=1.0),
        "+inf and NaN": only(vocab_size, {1: INF, 3: NAN}, rest=1.0),
        "all +inf": torch.full((vocab_size,), INF),
        "all -inf": torch.full((vocab_size,), -INF),
    }
    filters = [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 1.0}, {}, {"top_k": 1, "top_p": 1e-9, "min_p": 0.5}]
    return [
        EdgeRow(name=name, logits=logits, expected=range(vocab_size), **filters[i % len(filters)])  # type: ignore[arg-type]
        for i, (name, logits) in enumerate(kinds.items())
    ]


def number_of(logits: Tensor, kept: Sequence[int], target: int) -> float:
    """The middle of a token's stretch where only ``kept`` are left."""
    weights = torch.zeros(len(logits), dtype=torch.float64)
    weights[list(kept)] = logits[list(kept)].double().exp()
    ends = weights.cumsum(0) / weights.sum()
    return float(ends[target] - weights[target] / weights.sum() / 2)


def check_draws(draw: Draw, largest: Largest, *, vocab_size: int, device: str) -> None:
    """Assert that each row's token is one of those expected, all rows in one call, and its largest logit the first."""
    rows = edge_rows(vocab_size)
    logits = torch.stack([row.logits for row in rows])
    top, first = (each.cpu() for each in largest(logits.to(device)))
    healthy = torch.tensor([len(row.expected) < vocab_size for row in rows])
    assert top.isfinite().equal(healthy)
    assert top[healthy].equal(logits[healthy].amax(-1))
    assert [int((row == row.amax()).nonzero()[0]) for row in logits[healthy]] == first[healthy].tolist()
    assert bool(((first >= 0) & (first < vocab_size)).all())
    samples = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    asked = [rows[sample] for sample in samples.tolist()]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in asked], dtype=dtype, device=device)

    drawn = draw(
        logits.to(device),
        samples.to(device),
        top.to(device),
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float32),
        column("min_p", torch.float32),
        column("number", torch.float64),
        needs_filter=True,
    ).tolist()
    wrong = [(got, replace(row, logits=row.logits[:3])) for got, row in zip(drawn, asked, strict=True)]
    wrong = [(got, row) for got, row in wrong if got not in row.expected]
    assert not wrong, f"{len(wrong)} of {len(asked)}: {wrong[:3]}"


def check_sampler(kernels: DeviceKernels, plain: DeviceKernels, *, vocab_size: int, device: str) -> None:
    """Assert that a step of greedy, drawn, masked and sick samples has the same outcome as in plain torch on the CPU.

    The outcome is what the host sees: a token, and whether the row's logits were healthy, which ends a request if not.
    Two rows are made by masks: one has a single token left, the other none, which is not healthy either.
    """
    sick = sick_rows(vocab_size)
    sharp = [row for row in edge_rows(vocab_size) if len(row.expected) == 1]
    rows = [*sharp[::7], *sick, *sharp[:2]]
    single, none = len(rows) - 2, len(rows) - 1
    masked = torch.ones(2, vocab_size, dtype=torch.bool)
    masked[0, vocab_size - 3] = False
    pairs = masked.nonzero() + torch.tensor([single, 0])
    ours, theirs = (
        _outcome(rows, pairs, each, torch.device(where)) for each, where in ((kernels, device), (plain, "cpu"))
    )
    expected = torch.tensor([len(row.expected) == 1 for row in rows])
    expected[none] = False
    for tokens, flags in (ours, theirs):
        assert flags.bool().equal(expected)
        assert int(tokens[single]) == vocab_size - 3
        assert bool(((tokens >= 0) & (tokens < vocab_size)).all())
    assert ours[0][expected].equal(theirs[0][expected])


def _outcome(rows: Sequence[EdgeRow], masked: Tensor, kernels: DeviceKernels, device: torch.device) -> Tensor:
    """A step's output: ``[2, len(rows)]``, tokens above flags; ``masked`` holds pairs of sample and token."""
    count = len(rows)
    places = torch.randperm(count, generator=torch.Generator().manual_seed(2)).to(device)
    sampler = Sampler(max_rows=count, device=device, draw=kernels.draw, largest=kernels.largest)

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    sampler.set_rows(
        RowParams(
            rows=places,
            temperature=column("temperature", torch.float32),
            top_k=column("top_k", torch.int32),
            top_p=column("top_p", torch.float32),
            min_p=column("min_p", torch.float32),
            seed=torch.arange(count, device=device) * 977,
        )
    )
    logits = torch.stack([row.logits for row in rows])
    logits[-2:] = 0.0
    sampled = sampler.sample(
        logits.to(device),
        SampleInputs(
            rows=places,
            output_positions=torch.arange(count, dtype=torch.int32, device=device),
            random_samples=torch.arange(0, count, 2, device=device),
            masked_samples=masked[:, 0].to(device),
            masked_tokens=masked[:, 1].to(device),
            needs_filter=True,
        ),
    )
    output = torch.full((2 * count,), -1, dtype=torch.int32, device=device)
    last_tokens = torch.zeros(count + 1, dtype=torch.int64, device=device)
    kernels.edges.keep(sampled.tokens, sampled.top, places.to(torch.int32), last_tokens, output)
    assert last_tokens[places].equal(sampled.tokens)
    return output.view(2, count).cpu()
