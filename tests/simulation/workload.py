"""What happens in one simulated run, drawn from its seed: :class:`Workload`.

Sizes are small, so that requests collide: a few rows, pools that hold hardly more than the largest request, chunks of
one token, shared prefixes, ids that stop some runs. Expected outputs are computed here too.
"""

import random
from dataclasses import dataclass
from typing import Literal

from gapless.engine.admission import AdmissionLimits
from gapless.engine.request import EngineRequest
from gapless.engine.scheduler import SchedulerLimits
from gapless.sampling_params import SamplingParams
from simulation.hash_model import VOCAB_SIZE
from simulation.solo import AmbiguousDrawError, SoloOutput, solo

__all__ = ["AbortMoment", "PlannedAbort", "PlannedRequest", "Workload", "draw_workload", "expect"]

AbortMoment = Literal["waiting", "running", "retiring", "preempted", "anytime"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """A request, the turn of the loop before which it arrives, and what it must give."""

    source: EngineRequest
    arrival: int
    expected: SoloOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAbort:
    """An abort of the ``index``-th request (it may not exist yet, or ever) once it is in the state ``moment``."""

    index: int
    moment: AbortMoment
    turn: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One run."""

    seed: int
    depth: int
    scheduler: SchedulerLimits
    admission: AdmissionLimits
    num_blocks: int
    poison: int | None
    requests: tuple[PlannedRequest, ...]
    aborts: tuple[PlannedAbort, ...]
    last: PlannedRequest


def expect(
    source: EngineRequest, *, max_model_len: int, kv_capacity: int, poison: int | None = None
) -> SoloOutput:
    """What ``source`` gives alone, with ``max_tokens`` cut to the room there is."""
    room = min(max_model_len, kv_capacity) - len(source.prompt_token_ids) + 1
    wanted = source.params.max_tokens
    return solo(
        source.prompt_token_ids,
        source.params,
        max_tokens=room if wanted is None else min(wanted, room),
        stop_token_ids=source.stop_token_ids,
        poison=poison,
    )


def draw_workload(seed: int) -> Workload:
    """The run of a seed."""
    return _Drawing(seed).workload()


class _Drawing:
    """The draws of one seed, in order."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(f"workload-{seed}")
        choice = self._random.choice
        self._budget = choice([2, 5, 8, 16, 64])
        self._chunk = choice([1, 3, 8, 64, 64])
        self._poison = VOCAB_SIZE - 1 if self._random.random() < 0.15 else None
        # A prompt takes prompt / pace steps; this bounds the length of a run.
        self._pace = min(self._budget, self._chunk)
        # Short prompts with long outputs are admitted together and outgrow the pool together: they get preempted.
        self._outgrow = self._random.random() < 0.35
        self._longest_prompt = 4 if self._outgrow else 8 if self._pace < 3 else 20
        self._bases = [[self._token() for _ in range(self._longest_prompt)] for _ in range(2)]

    def workload(self) -> Workload:
        choice, randint = self._random.choice, self._random.randint
        prompts = [self._prompt() for _ in range(randint(3, 6) if self._outgrow else randint(1, 8))]
        limits = [choice([5, 9, 12] if self._outgrow else [0, 1, 1, 2, 3, 5, 8, 12]) for _ in prompts]
        block_size = choice([1, 2, 3, 4] if self._outgrow else [1, 2, 3, 4, 8])
        longest = max(len(prompt) + max(most, 1) - 1 for prompt, most in zip(prompts, limits, strict=True))
        num_blocks = -(-longest // block_size)
        if self._pace < 3 or self._outgrow or self._random.random() < 0.75:
            num_blocks += choice([0, 0, 1, 1, 2])
        else:
            num_blocks *= randint(2, 3)
        capacity = num_blocks * block_size
        max_rows = choice([3, 4, 6] if self._outgrow else [1, 2, 3, 4, 6])
        admission = AdmissionLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=capacity + randint(0, 4) if self._random.random() < 0.8 else max(map(len, prompts)),
            kv_capacity=capacity,
            max_waiting=100,
        )
        arrival = 0
        requests: list[PlannedRequest] = []
        for prompt, most in zip(prompts, limits, strict=True):
            arrival += choice([0, 0, 0, 1, 2, 4])
            requests.append(self._request(prompt, most, arrival, admission))
        return Workload(
            seed=self._seed,
            depth=choice([1, 2, 2, 3, 3, 4]),
            scheduler=SchedulerLimits(
                max_rows=max_rows,
                token_budget=self._budget,
                chunk_size=self._chunk,
                block_size=block_size,
                max_changes=choice([num_blocks, 4 * num_blocks * max_rows]),
                prefix_caching=self._random.random() < 0.7,
                buckets=choice([(), (1, 2, 4, 8), (4,), (2, 6)]),
            ),
            admission=admission,
            num_blocks=num_blocks,
            poison=self._poison,
            requests=tuple(requests),
            aborts=tuple(self._aborts(len(requests), arrival)),
            last=self._last(admission),
        )

    def _token(self) -> int:
        return self._random.randrange(VOCAB_SIZE - 1)

    def _prompt(self) -> list[int]:
        length = self._random.randint(1, self._longest_prompt)
        base = self._random.choice(self._bases)
        shared = self._random.choice([0, length // 2, length - 1, length])
        prompt = base[:shared] + [self._token() for _ in range(length - shared)]
        if self._poison is not None and self._random.random() < 0.3:
            prompt[self._random.randrange(length)] = self._poison
        return prompt

    def _request(self, prompt: list[int], most: int, arrival: int, admission: AdmissionLimits) -> PlannedRequest:
        greedy = self._random.random() < 0.6
        stops = self._stops(prompt, most) if self._random.random() < 0.4 else []
        salt = self._random.choice([b"", b"", b"", b"other"])
        streams = self._random.random() < 0.5
        while True:
            params = SamplingParams(
                temperature=0.0 if greedy else self._random.choice([0.5, 1.0, 1.5]),
                top_k=self._random.choice([0, 0, 1, 5]),
                top_p=self._random.choice([1.0, 1.0, 0.8]),
                min_p=self._random.choice([0.0, 0.0, 0.05]),
                seed=self._random.getrandbits(63),
                max_tokens=None if admission.max_model_len < len(prompt) + 3 else most,
                min_tokens=self._random.randint(0, most) if self._random.random() < 0.3 else 0,
                stop_token_ids=stops[:1],
            )
            source = EngineRequest(
                prompt_token_ids=prompt,
                params=params,
                stop_token_ids=frozenset(stops),
                streams=streams,
                salt=salt,
            )
            try:
                expected = expect(
                    source,
                    max_model_len=admission.max_model_len,
                    kv_capacity=admission.kv_capacity,
                    poison=self._poison,
                )
            except AmbiguousDrawError:
                continue
            return PlannedRequest(source=source, arrival=arrival, expected=expected)

    def _stops(self, prompt: list[int], most: int) -> list[int]:
        """Ids that end a request; often one that a greedy run comes across."""
        stops = [self._token() for _ in range(self._random.randint(1, 2))]
        met = solo(prompt, SamplingParams(temperature=0), max_tokens=most, poison=self._poison).token_ids
        if met and self._random.random() < 0.8:
            stops.append(self._random.choice(met))
        self._random.shuffle(stops)
        return stops

    def _aborts(self, num_requests: int, last_arrival: int) -> list[PlannedAbort]:
        if self._random.random() < 0.4:
            return []
        moments: list[AbortMoment] = ["waiting", "running", "retiring", "preempted", "anytime"]
        return [
            PlannedAbort(
                index=self._random.randint(0, num_requests),
                moment=self._random.choice(moments),
                turn=self._random.randint(0, last_arrival + 12),
            )
            for _ in range(self._random.randint(1, 3))
        ]

    def _last(self, admission: AdmissionLimits) -> PlannedRequest:
        """A request that needs every block (or the whole context, if that is shorter)."""
        room = min(admission.kv_capacity, admission.max_model_len)
        length = max(1, room - self._random.randint(0, 3))
        while True:
            source = EngineRequest(
                prompt_token_ids=[self._token() for _ in range(length)],
                params=SamplingParams(temperature=0, max_tokens=None),
                salt=b"last",
            )
            expected = expect(
                source,
                max_model_len=admission.max_model_len,
                kv_capacity=admission.kv_capacity,
                poison=self._poison,
            )
            if expected.finish_reason == "length":
                return PlannedRequest(source=source, arrival=0, expected=expected)
