"""What a benchmark runs: :class:`Workload`, requests that are the same in every run and on every machine.

Synthetic prompts are random ids of one seed, and no two of them begin alike, so nothing can be had from a prefix cache.
Real prompts come from a JSONL file. Everything here is made before a model's weights are loaded, from its
configuration and its tokenizer alone, so that a workload that cannot run is refused at once. Pure functions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gapless.engine.request import EngineRequest
from gapless.errors import ConfigError, PromptTooLongError, RequestError
from gapless.prompt_files import InputError, Job, parse_jsonl
from gapless.prompts import prepare_prompt
from gapless.sampling_params import SamplingParams
from gapless.text.tokenizer import Tokenizer

__all__ = ["Lengths", "Workload", "jsonl_workload", "synthetic_workload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn uniformly from ``mean * (1 - spread)`` to ``mean * (1 + spread)``, at least 1.

    Args:
        mean: tokens, at least 1.
        spread: 0 for equal lengths, at most 1.

    Raises:
        ConfigError: naming the value.
    """

    mean: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.mean, bool) or not isinstance(self.mean, int) or self.mean < 1:
            raise ConfigError(f"a length of {self.mean} tokens cannot be run: give at least 1")
        if not 0 <= self.spread <= 1:
            raise ConfigError(f"spread={self.spread} must be in [0, 1]: a share of the mean length")

    @property
    def largest(self) -> int:
        """The largest that can be drawn, in tokens."""
        return int(self.mean * (1 + self.spread))

    def draw(self, numbers: random.Random) -> int:
        """One length, in tokens."""
        return numbers.randint(max(1, round(self.mean * (1 - self.spread))), self.largest)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are queued together.

    Attributes:
        name: one line that describes it, for tables and files.
        requests: in the order in which they are queued.
        ends_by_length: whether every request ends by its number of tokens, so that the steps are the same at every
            depth.
    """

    name: str
    requests: tuple[EngineRequest, ...]
    ends_by_length: bool

    @cached_property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @cached_property
    def longest_context(self) -> int:
        """The most tokens a request may reach, prompt and output together."""
        return max(len(request.prompt_token_ids) + (request.params.max_tokens or 0) for request in self.requests)

    @cached_property
    def max_new_tokens(self) -> int:
        """The most new tokens of one request."""
        return max(request.params.max_tokens or 0 for request in self.requests)

    def check(self, max_model_len: int) -> None:
        """Refuse a workload that a context of ``max_model_len`` tokens does not hold.

        The last token is sampled and never fed back, so a request may have one more token than the context.

        Raises:
            PromptTooLongError: naming the request, its length and the limit.
        """
        for index, request in enumerate(self.requests):
            prompt, new = len(request.prompt_token_ids), request.params.max_tokens or 0
            if prompt + max(new, 1) - 1 > max_model_len:
                raise PromptTooLongError(
                    f"request {index} has a prompt of {prompt} and {new} new tokens, and the context holds "
                    f"{max_model_len}: shorten the prompt, ask for fewer tokens, or use a model with a longer context"
                )

    def first(self, count: int) -> "Workload":
        """The first ``count`` requests; all if there are fewer."""
        return replace(self, requests=self.requests[:count])

    def shortened(self, max_new_tokens: int) -> "Workload":
        """The same prompts with at most ``max_new_tokens`` new tokens each: a warm-up that meets the same shapes."""
        requests = tuple(
            replace(each, params=replace(each.params, max_tokens=min(each.params.max_tokens or 0, max_new_tokens)))
            for each in self.requests
        )
        return replace(self, requests=requests)


def synthetic_workload(
    *, requests: int, prompt: Lengths, new: Lengths, vocab_size: int, seed: int = 0, streams: bool = False
) -> Workload:
    """Greedy requests with random prompts, no two of which begin alike; EOS is ignored.

    Args:
        requests: how many, at least 1.
        prompt: tokens of a prompt.
        new: tokens to generate.
        vocab_size: of the model.
        seed: of lengths and ids.
        streams: whether every token is published as it comes.

    Raises:
        ConfigError: no request at all.
    """
    if requests < 1:
        raise ConfigError(f"requests={requests}: a benchmark needs at least 1")
    numbers = random.Random(seed)
    vocabulary = range(vocab_size)
    made = tuple(
        EngineRequest(
            prompt_token_ids=_distinct_start(
                index, requests, numbers.choices(vocabulary, k=prompt.draw(numbers)), vocab_size
            ),
            params=SamplingParams(temperature=0.0, max_tokens=new.draw(numbers)),
            streams=streams,
        )
        for index in range(requests)
    )
    count = _count(requests, "request")
    return Workload(name=f"{count} x {_shown(prompt)} + {_shown(new)} tokens", requests=made, ends_by_length=True)


def jsonl_workload(
    path: Path,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    max_model_len: int,
    eos_token_ids: frozenset[int] = frozenset(),
    limit: int | None = None,
) -> Workload:
    """Requests of a JSONL file, in the format of ``gapless generate --input``.

    Texts are tokenised here, so a run measures the engine alone. Requests are greedy unless their line says otherwise;
    one that samples without a seed gets its line's number as seed.

    Args:
        path: the file.
        tokenizer: of the model.
        max_tokens: new tokens of lines that do not say.
        max_model_len: caps new tokens, as serving does.
        eos_token_ids: what ends a request; empty lets each run to its ``max_tokens``.
        limit: use at most this many lines; ``None`` for all.

    Raises:
        InputError: a line that is no prompt, or that needs its text while it runs (``stop``, ``bad_words``).
        ConfigError: the file has no prompt.
        OSError: it cannot be read.
    """
    defaults = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    with path.open(encoding="utf-8") as lines:
        jobs = parse_jsonl(lines, str(path), defaults)[:limit]
    if not jobs:
        raise ConfigError(f'{path} has no prompts: write lines such as {{"prompt": "..."}}')
    requests = tuple(
        _request_of(job, index, tokenizer, max_model_len=max_model_len, eos_token_ids=eos_token_ids)
        for index, job in enumerate(jobs)
    )
    return Workload(
        name=f"{_count(len(requests), 'prompt')} of {path.name}",
        requests=requests,
        ends_by_length=not any(request.stop_token_ids for request in requests),
    )


def _request_of(
    job: Job, index: int, tokenizer: Tokenizer, *, max_model_len: int, eos_token_ids: frozenset[int]
) -> EngineRequest:
    params = job.params
    if params.stops or params.bad_words or params.n > 1:
        raise InputError(f"{job.place}: a benchmark cannot use stop, bad_words or n: leave them out")
    ids = _encoded(job, tokenizer)
    room = max_model_len - len(ids) + 1
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    eos = frozenset() if params.ignore_eos else eos_token_ids
    return EngineRequest(
        prompt_token_ids=ids,
        params=replace(params, max_tokens=max(wanted, 1), seed=index if params.seed is None else params.seed),
        stop_token_ids=eos.union(params.stop_token_ids),
    )


def _encoded(job: Job, tokenizer: Tokenizer) -> Sequence[int]:
    try:
        if job.source == "messages":
            return tokenizer.encode_chat(job.value)
        return prepare_prompt({job.source: job.value}, tokenizer).token_ids
    except RequestError as error:
        raise InputError(f"{job.place}: {error}") from error


def _distinct_start(index: int, count: int, ids: list[int], vocab_size: int) -> list[int]:
    """Begin with the request's number, in as few digits (to the base of the vocabulary) as tell all requests apart."""
    digits = 1
    while vocab_size**digits < count:
        digits += 1
    number = [index // vocab_size**place % vocab_size for place in range(digits)]
    return (number + ids[digits:])[: len(ids)]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _shown(lengths: Lengths) -> str:
    return f"{lengths.mean:,}" if not lengths.spread else f"{lengths.mean:,} ± {lengths.spread:.0%}"
