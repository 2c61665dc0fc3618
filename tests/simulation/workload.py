"""What happens in one simulated run, drawn from its seed: :class:`Workload`.

Sizes are small, so that requests collide: a few rows, pools that hold hardly more than the largest request, chunks of
one token, shared prefixes, ids that stop some runs. Expected outputs are computed here too.
"""

import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from gapless.engine.admission import AdmissionLimits
from gapless.engine.request import EngineRequest
from gapless.engine.scheduler import SchedulerLimits
from gapless.errors import RequestError
from gapless.pipeline.logprobs import LogprobLimits
from gapless.pipeline.wide_rows import WideLimits
from gapless.sampling_params import SamplingParams
from simulation.hash_model import VOCAB_SIZE
from simulation.judge import JudgeMaker
from simulation.setting import PlannedRequest, Setting, greedy, step_buckets
from simulation.solo import AmbiguousDrawError, solo

__all__ = ["AbortMoment", "PlannedAbort", "Workload", "draw_workload"]

AbortMoment = Literal["waiting", "running", "retiring", "preempted", "anytime"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedAbort:
    """An abort of the ``index``-th request (it may not exist yet, or ever) once it is in the state ``moment``.

    It hits the first of its choices only, or all of them.
    """

    index: int
    moment: AbortMoment
    turn: int
    first_only: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One run."""

    setting: Setting
    requests: tuple[PlannedRequest, ...]
    aborts: tuple[PlannedAbort, ...]
    last: PlannedRequest


def draw_workload(seed: int) -> Workload:
    """The run of a seed."""
    return _Drawing(seed).workload()


class _Drawing:
    """The draws of one seed, in order."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(f"workload-{seed}")
        # Draws of their own, on which the others do not depend.
        self._choices = random.Random(f"choices-{seed}")
        self._mixed = random.Random(f"mixed-{seed}")
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
        setting = Setting(
            seed=self._seed,
            depth=choice([1, 2, 2, 3, 3, 4]),
            scheduler=SchedulerLimits(
                max_rows=max_rows,
                token_budget=self._budget,
                chunk_size=self._chunk,
                block_size=block_size,
                max_changes=choice([num_blocks, 4 * num_blocks * max_rows]),
                prefix_caching=self._random.random() < 0.7,
                buckets=step_buckets(
                    max_rows,
                    choice([(), (1, 2, 4, 8), (4,), (2, 6)]),
                    self._mixed.choice([(), (4, 8, 16), (6,), (2, 3, 64)]),
                ),
                wide=WideLimits(
                    max_rows=self._random.randint(1, max_rows),
                    max_history=choice([capacity, 4 * capacity]),
                    max_biases=choice([VOCAB_SIZE, 4 * VOCAB_SIZE]),
                    max_word_inits=choice([1, 4]),
                ),
                logprobs=LogprobLimits(max_top=5, max_prompt_tokens=choice([1, 3, self._budget])),
            ),
            admission=admission,
            num_blocks=num_blocks,
            poison=self._poison,
        )
        arrival = 0
        requests: list[PlannedRequest] = []
        for prompt, most in zip(prompts, limits, strict=True):
            arrival += choice([0, 0, 0, 1, 2, 4])
            requests.append(self._request(prompt, most, arrival, setting))
        return Workload(
            setting=setting,
            requests=tuple(requests),
            aborts=tuple(self._aborts(len(requests), arrival)),
            last=self._last(setting),
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

    def _request(self, prompt: list[int], most: int, arrival: int, setting: Setting) -> PlannedRequest:
        greedy = self._random.random() < 0.6
        stops = self._stops(prompt, most) if self._random.random() < 0.4 else []
        salt = self._random.choice([b"", b"", b"", b"other"])
        streams = self._random.random() < 0.5
        num_choices = self._choices.choice([1, 1, 1, 1, 2, 3])
        pair = self._pair(prompt, most) if self._choices.random() < 0.25 else None
        late = self._choices.choice([0, 0, 1, 3])
        while True:
            params = SamplingParams(
                n=num_choices,
                temperature=0.0 if greedy else self._random.choice([0.5, 1.0, 1.5]),
                top_k=self._random.choice([0, 0, 1, 5]),
                top_p=self._random.choice([1.0, 1.0, 0.8]),
                min_p=self._random.choice([0.0, 0.0, 0.05]),
                seed=self._random.getrandbits(63),
                max_tokens=None if setting.room < len(prompt) + 3 else most,
                min_tokens=self._random.randint(0, most) if self._random.random() < 0.3 else 0,
                stop_token_ids=stops[:1],
                logprobs=self._random.choice([None, None, 0, 2, 5]),
                # Where the prompt's log-probs are no numbers a request fails before it samples.
                prompt_logprobs=None if self._poison in prompt else self._random.choice([None, None, None, 0, 3]),
                **self._wide_options(stops),
            )
            source = EngineRequest(
                prompt_token_ids=prompt,
                params=params,
                stop_token_ids=frozenset(stops),
                streams=streams,
                salt=salt,
                bad_words=[word for word in params.bad_words if not isinstance(word, str)],
                make_stop_check=pair and JudgeMaker(pair=pair, late=late, min_tokens=params.min_tokens),
            )
            # Token options may contradict each other; such a request would be refused.
            with suppress(AmbiguousDrawError, RequestError):
                setting.admission.check(source)
                return setting.plan(source, arrival)

    def _wide_options(self, stops: list[int]) -> dict[str, Any]:
        """Penalties, biases and bad words; where few ids are allowed tokens repeat, and a lost one shows."""
        choice, some = self._random.choice, self._random.random
        if some() < 0.5:
            return {}
        options: dict[str, Any] = {}
        few = list({*stops, *(self._token() for _ in range(4))})
        if some() < 0.6:
            options["allowed_token_ids"] = few
        if some() < 0.7:
            options["repetition_penalty"] = choice([1.0, 1.3, 4.0])
            options["frequency_penalty"] = choice([0.0, 0.7, 2.0, -1.0])
            options["presence_penalty"] = choice([0.0, 1.5])
        if some() < 0.3:
            options["logit_bias"] = {self._token(): choice([-100.0, 3.0, 5.0]) for _ in range(3)}
        if some() < 0.4:
            lengths = [choice([1, 2, 2, 3]) for _ in range(3)]
            options["bad_words"] = [[choice(few) for _ in range(length)] for length in lengths]
        return options

    def _pair(self, prompt: list[int], most: int) -> tuple[int, int] | None:
        """Two ids that a greedy run comes across side by side."""
        met = solo(prompt, SamplingParams(temperature=0), max_tokens=most, poison=self._poison).token_ids
        return self._choices.choice(list(pairwise(met))) if len(met) > 1 else None

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
                first_only=self._choices.random() < 0.4,
            )
            for _ in range(self._random.randint(1, 3))
        ]

    def _last(self, setting: Setting) -> PlannedRequest:
        """A request that needs every block (or the whole context, if that is shorter)."""
        length = max(1, setting.room - self._random.randint(0, 3))
        while True:
            source = greedy([self._token() for _ in range(length)], None, salt=b"last")
            planned = setting.plan(source)
            if planned.expected.finish_reason == "length":
                return planned
