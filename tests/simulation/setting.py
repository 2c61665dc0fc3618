"""An engine's sizes in a simulated run or a unit test: :class:`Setting`, and requests with what they must give."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from gapless.engine.admission import AdmissionLimits
from gapless.engine.request import EngineRequest, choice_seed
from gapless.engine.scheduler import SchedulerLimits
from gapless.pipeline.padding import StepBuckets
from gapless.sampling_params import SamplingParams
from simulation.hash_model import VOCAB_SIZE
from simulation.judge import JudgeMaker, judged
from simulation.solo import AmbiguousDrawError, SoloOutput, solo

__all__ = ["PlannedRequest", "Setting", "greedy", "make_setting", "step_buckets"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRequest:
    """A request, the turn of the loop before which it arrives, and what its first and its further choices must give."""

    source: EngineRequest
    expected: SoloOutput
    further: tuple[SoloOutput, ...] = ()
    arrival: int = 0

    @property
    def choices(self) -> tuple[SoloOutput, ...]:
        """What each choice must give, in their order."""
        return (self.expected, *self.further)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Everything an engine over the hash model is built from.

    Attributes:
        seed: of the junk in the KV cache.
        poison: a token whose KV is not a number.
    """

    depth: int
    scheduler: SchedulerLimits
    admission: AdmissionLimits
    num_blocks: int
    seed: int = 0
    poison: int | None = None

    @property
    def room(self) -> int:
        """Positions that one request can have."""
        return min(self.admission.max_model_len, self.admission.kv_capacity)

    def plan(self, source: EngineRequest, arrival: int = 0) -> PlannedRequest:
        """Add what ``source`` gives alone, with ``max_tokens`` cut to the room there is."""
        room = self.room - len(source.prompt_token_ids) + 1
        wanted = source.params.max_tokens
        choices = []
        for index in range(source.params.n):
            seed = None if source.params.seed is None else choice_seed(source.params.seed, index)
            output = solo(
                source.prompt_token_ids,
                replace(source.params, seed=seed),
                max_tokens=room if wanted is None else min(wanted, room),
                stop_token_ids=source.stop_token_ids,
                bad_words=source.bad_words,
                poison=self.poison,
            )
            maker = source.make_stop_check
            choices.append(judged(output, maker) if isinstance(maker, JudgeMaker) else output)
        return PlannedRequest(source=source, expected=choices[0], further=tuple(choices[1:]), arrival=arrival)

    def plan_seeded(self, source: EngineRequest, first_seed: int = 0) -> PlannedRequest:
        """As :meth:`plan`, with the first seed from ``first_seed`` on whose draws are beyond doubt."""
        for seed in range(first_seed, first_seed + 1000):
            with suppress(AmbiguousDrawError):
                return self.plan(replace(source, params=replace(source.params, seed=seed)))
        raise AmbiguousDrawError


def make_setting(
    *,
    depth: int = 2,
    num_blocks: int = 16,
    block_size: int = 4,
    max_rows: int = 4,
    token_budget: int = 16,
    chunk_size: int = 16,
    prefix_caching: bool = True,
    buckets: tuple[int, ...] = (),
    mixed_buckets: tuple[int, ...] = (),
    max_model_len: int | None = None,
    max_waiting: int = 1000,
    poison: int | None = None,
) -> Setting:
    """A setting with defaults that suit a unit test."""
    capacity = num_blocks * block_size
    return Setting(
        depth=depth,
        num_blocks=num_blocks,
        poison=poison,
        scheduler=SchedulerLimits(
            max_rows=max_rows,
            token_budget=token_budget,
            chunk_size=chunk_size,
            block_size=block_size,
            max_changes=max_rows * num_blocks,
            prefix_caching=prefix_caching,
            buckets=step_buckets(max_rows, buckets, mixed_buckets),
        ),
        admission=AdmissionLimits(
            vocab_size=VOCAB_SIZE,
            max_model_len=capacity if max_model_len is None else max_model_len,
            kv_capacity=capacity,
            max_waiting=max_waiting,
        ),
    )


def step_buckets(max_rows: int, decode: tuple[int, ...], mixed: tuple[int, ...]) -> StepBuckets | None:
    """Sizes to pad to, or none."""
    return StepBuckets(num_rows=max_rows, decode=decode, mixed=mixed) if decode or mixed else None


def greedy(
    prompt: Sequence[int],
    max_tokens: int | None = 4,
    *,
    stop: Iterable[int] = (),
    min_tokens: int = 0,
    streams: bool = False,
    salt: bytes = b"",
) -> EngineRequest:
    """A greedy request; ``stop`` are its EOS ids."""
    return EngineRequest(
        prompt_token_ids=prompt,
        params=SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=min_tokens),
        stop_token_ids=frozenset(stop),
        streams=streams,
        salt=salt,
    )
