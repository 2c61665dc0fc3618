"""One request's generations, from its prompts to its end: :class:`Answer`, which all generating endpoints use.

The choices of several prompts become one list: choice ``i`` of prompt ``p`` has the index ``p * n + i``. Everything is
checked before anything is queued, and whatever ends an answer early (an error, a client that has gone, a deadline)
aborts all its generations. Belongs to the event loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, Self

from gapless.errors import EngineDeadError, RequestError, RequestFailedError
from gapless.outputs import TokenLogprobsById
from gapless.prompts import PreparedPrompt
from gapless.sampling_params import SamplingParams
from gapless.server.context import ServerContext
from gapless.server.generation import ChoiceDelta, Generation
from gapless.server.metrics import GenerationWatch
from gapless.text.bad_words import bad_word_ids

__all__ = ["MAX_IDS_IN_ALL", "MAX_RATED_IN_ALL", "Answer", "CollectedChoice", "IndexedDelta"]

MAX_IDS_IN_ALL: Final = 1 << 20
"""Most ids that the parameters of a request name, those of each prompt counted."""
MAX_RATED_IN_ALL: Final = 1 << 20
"""Most log-probs of prompts in one answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedDelta:
    """News of one choice.

    Attributes:
        index: among the choices of the answer.
        generation: whose choice it is.
    """

    index: int
    generation: Generation
    delta: ChoiceDelta


@dataclass(kw_only=True, slots=True)
class CollectedChoice:
    """A choice at its end."""

    index: int
    generation: Generation
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobsById] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.texts)


class Answer:
    """The generations of a request, which have been queued; leaving the context ends what still runs.

    Args:
        context: of the server.
        generations: one for each prompt, all with the same parameters.
    """

    def __init__(self, context: ServerContext, generations: Sequence[Generation]) -> None:
        self.generations = list(generations)
        self.params = self.generations[0].params
        self._watches: list[GenerationWatch] = []
        self._metrics = context.metrics
        self._stack = AsyncExitStack()

    @classmethod
    async def start(
        cls, context: ServerContext, prompts: Sequence[PreparedPrompt], params: SamplingParams, *, salt: bytes
    ) -> Self:
        """Queue all prompts, or none of them.

        Raises:
            RequestError: one cannot be served.
            EngineDeadError: the engine has ended.
        """
        client = context.client
        _check_size(params, prompts)
        params.check_vocabulary(client.vocab_size)
        if params.bad_words:  # once for all prompts, and not in the event loop
            words = await asyncio.to_thread(bad_word_ids, params.bad_words, client.tokenizer)
            params = replace(params, bad_words=words)
        tasks = [asyncio.ensure_future(client.submit(prompt, params, salt=salt)) for prompt in prompts]
        try:
            return cls(context, await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Generation):
                    result.abort()
            raise

    async def __aenter__(self) -> Self:
        for generation in self.generations:
            self._stack.callback(generation.abort)
            self._watches.append(self._stack.enter_context(self._metrics.watch(generation)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def news(self) -> AsyncGenerator[list[IndexedDelta], None]:
        """News of all choices as they come, those of a moment together.

        Raises:
            RequestFailedError: a choice ended in an error of its own.
            EngineDeadError: the engine has ended, or is being ended.
        """
        if len(self.generations) == 1:
            async for deltas in self.generations[0]:
                yield self._indexed(0, deltas)
            return
        async for batch in _merged([self._pump(number) for number in range(len(self.generations))]):
            yield [each for number, deltas in batch for each in self._indexed(number, deltas)]

    async def collect(self) -> list[CollectedChoice]:
        """All choices at their end; raises as :meth:`news`."""
        choices = [
            CollectedChoice(index=number * self.params.n + i, generation=generation)
            for number, generation in enumerate(self.generations)
            for i in range(self.params.n)
        ]
        async for batch in self.news():
            for each in batch:
                choice, delta = choices[each.index], each.delta
                choice.texts.append(delta.text)
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs or ()
                choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return choices

    def usage(self) -> dict[str, Any]:
        """The tokens so far, as OpenAI counts them."""
        prompt = sum(each.num_prompt_tokens for each in self.generations)
        completion = sum(each.num_completion_tokens for each in self.generations)
        cached = sum(each.num_cached_tokens for each in self.generations)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _indexed(self, number: int, deltas: list[ChoiceDelta]) -> list[IndexedDelta]:
        self._watches[number].add(deltas)
        first = number * self.params.n
        generation = self.generations[number]
        for delta in deltas:
            if delta.finish_reason == "error":
                raise RequestFailedError(delta.error or "the request failed on the engine")
            if delta.finish_reason == "abort":
                raise EngineDeadError("the engine is being ended")
        return [IndexedDelta(index=first + delta.index, generation=generation, delta=delta) for delta in deltas]

    def _pump(self, number: int) -> Callable[["asyncio.Queue[_Item]"], Awaitable[None]]:
        async def pump(queue: "asyncio.Queue[_Item]") -> None:
            async for deltas in self.generations[number]:
                await queue.put((number, deltas))

        return pump


_Item = tuple[int, list[ChoiceDelta]]


def _check_size(params: SamplingParams, prompts: Sequence[PreparedPrompt]) -> None:
    """A short request must not stand for a large one.

    Each prompt takes its own copy of the parameters to the engine, where 2,000 of 65,000 ids would be a gigabyte, and
    each choice of a completion gives the log-probs of its prompt again.
    """
    num_prompts, num_tokens = len(prompts), sum(len(prompt.token_ids) for prompt in prompts)
    if params.prompt_logprobs is not None:
        num_rated = num_tokens * (params.prompt_logprobs + 1) * params.n
        if num_rated > MAX_RATED_IN_ALL:
            raise RequestError(
                f"prompt_logprobs={params.prompt_logprobs} for {num_tokens} tokens and n={params.n} makes {num_rated} "
                f"log-probs; at most {MAX_RATED_IN_ALL} are allowed: send fewer prompts at once, or ask for fewer"
            )
    num_ids = len(params.allowed_token_ids or ()) + len(params.logit_bias or ())
    if num_ids * num_prompts > MAX_IDS_IN_ALL:
        raise RequestError(
            f"allowed_token_ids and logit_bias name {num_ids} ids for each of {num_prompts} prompts; together at most "
            f"{MAX_IDS_IN_ALL} are allowed: send fewer prompts at once"
        )


async def _merged(
    pumps: Sequence[Callable[["asyncio.Queue[_Item]"], Awaitable[None]]],
) -> AsyncGenerator[list[_Item], None]:
    """What several pumps put into a queue, until the last of them ends; one that fails ends them all.

    The queue is short: while it is full the generations themselves keep what is new, each in one piece.
    """
    queue: asyncio.Queue[_Item | BaseException | None] = asyncio.Queue(maxsize=len(pumps))

    async def run(pump: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await pump(queue)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(run(pump)) for pump in pumps]
    try:
        running = len(tasks)
        while running:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            news: list[_Item] = []
            for item in items:
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    news.append(item)
            if news:
                yield news
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
