"""The text side of one request whose engine is in another process: :class:`Generation`.

News come in as tokens and become text at once, in the event loop: a stop string must end its request even if nobody
reads. What a consumer has not taken yet gathers for each choice, so a slow one gets fewer and larger deltas, and memory
is bounded by what was generated. Stop strings are decided by the same judge as in :class:`gapless.LLM`; the engine is
told to stop. Everything belongs to the event loop's thread.
"""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from gapless.engine.logprobs import TokenLogprobs
from gapless.errors import EngineDeadError
from gapless.output_building import prompt_logprobs_by_id, sum_logprobs
from gapless.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprobsById
from gapless.prompts import PreparedPrompt
from gapless.sampling_params import SamplingParams
from gapless.server.choice_text import ChoiceDelta, ChoiceText
from gapless.server.logs import request_fields
from gapless.server.received_news import ChoiceUpdate
from gapless.text.base_tokenizer import Tokenizer
from gapless.text.stop_strings import StopStringCheck

__all__ = ["ChoiceDelta", "Generation"]

_log = logging.getLogger("gapless")


class Generation:
    """One running request: an asynchronous iterator of lists of :class:`ChoiceDelta`.

    ::

        async with await client.submit(prompt, params) as generation:
            async for deltas in generation:
                ...

    It ends after the last delta of the last choice. Leaving the block, closing it, or cancelling the task that waits
    for a delta aborts what is left of it at once, and dropping the last reference does so at its next token. Iterating
    raises :class:`EngineDeadError` if the engine is gone.

    Args:
        prompt: what was asked.
        params: complete parameters.
        tokenizer: of the model.
        make_stop_check: makes the judge of a choice's text, for parameters with stop strings.
        abort: tells the engine to end choices, by their ids.

    Attributes:
        receivers: what hears the engine's news, one for each choice.
        metrics: when it arrived, when its first token came and when it ended, in seconds of ``time.perf_counter()`` of
            this process.
        num_cached_tokens: prompt tokens that came from the prefix cache; known with the first delta.
    """

    def __init__(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams,
        tokenizer: Tokenizer,
        *,
        make_stop_check: Callable[[], StopStringCheck] | None,
        abort: Callable[[Sequence[int]], None],
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.metrics = RequestMetrics(arrived_s=time.perf_counter())
        self.num_cached_tokens = 0
        checks = [make_stop_check() if make_stop_check is not None else None for _ in range(params.n)]
        self.receivers = [
            _Receiver(self, ChoiceText(index, params, tokenizer, check), abort) for index, check in enumerate(checks)
        ]
        self._tokenizer = tokenizer
        self._abort = abort
        self._ready = asyncio.Event()
        self._error: EngineDeadError | None = None
        self._num_running = params.n
        self._rated_prompt: list[TokenLogprobs | None] | None = None
        self._prompt_logprobs: list[TokenLogprobsById | None] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; they count once, however many choices there are."""
        return len(self.prompt.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens so far of all choices together, EOS and stop tokens included; final at the end."""
        return sum(receiver.text.num_tokens for receiver in self.receivers)

    @property
    def finished(self) -> bool:
        """Whether all choices have ended; their last deltas may not have been taken yet."""
        return self._num_running == 0

    @property
    def prompt_logprobs(self) -> list[TokenLogprobsById | None] | None:
        """One mapping for each prompt token, ``None`` for the first, if asked for; known with the first delta."""
        if self._rated_prompt is not None:
            self._prompt_logprobs = prompt_logprobs_by_id(self.prompt, self._rated_prompt, self._tokenizer)
            self._rated_prompt = None
        return self._prompt_logprobs

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]:
        return self

    async def __anext__(self) -> list[ChoiceDelta]:
        while True:
            deltas = [delta for receiver in self.receivers if (delta := receiver.text.take()) is not None]
            if deltas:
                return deltas
            if self.finished:
                raise StopAsyncIteration
            if self._error is not None:
                raise type(self._error)(str(self._error))
            self._ready.clear()
            try:
                await self._ready.wait()
            except BaseException:  # cancelled: who waited is gone
                self.abort()
                raise

    async def result(self) -> RequestOutput:
        """Wait for the end and return everything at once, as :meth:`gapless.LLM.generate` does.

        Raises:
            EngineDeadError: the engine is gone.
        """
        rated = self.params.logprobs is not None
        outputs = [
            CompletionOutput(index=index, text="", token_ids=[], logprobs=[] if rated else None)
            for index in range(self.params.n)
        ]
        texts: list[list[str]] = [[] for _ in outputs]
        async for deltas in self:
            for delta in deltas:
                output = outputs[delta.index]
                texts[delta.index].append(delta.text)
                output.token_ids += delta.token_ids
                if output.logprobs is not None:
                    output.logprobs += delta.logprobs or ()
                output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
                output.error = delta.error
        for output, parts in zip(outputs, texts, strict=True):
            output.text = "".join(parts)
            output.cumulative_logprob = sum_logprobs(output.token_ids, output.logprobs)
        return RequestOutput(
            request_id=str(self.receivers[0].choice_id),
            prompt=self.prompt.text,
            prompt_token_ids=self.prompt.token_ids,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            prompt_logprobs=self.prompt_logprobs,
        )

    def abort(self) -> None:
        """End what still runs; the last deltas of its choices say ``"abort"``. A second or late call is nothing."""
        running = [receiver for receiver in self.receivers if receiver.text.finish_reason is None]
        for receiver in running:
            receiver.text.end("abort")
            self._one_ended()
        if self._error is None:
            self._abort([receiver.choice_id for receiver in running])

    async def aclose(self) -> None:
        """:meth:`abort`, under the name that asynchronous iterators have for it."""
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    # --- for the receivers --------------------------------------------------------------------------------------------

    def heard(self, receiver: "_Receiver", *, tokens: bool, engine_ended_it: bool) -> None:
        """A choice, which had not ended, has been told something."""
        text = receiver.text
        if tokens and self.metrics.first_token_s is None:
            self.metrics.first_token_s = time.perf_counter()
        if text.finish_reason is not None:
            self._one_ended()
            if not engine_ended_it:
                self._abort([receiver.choice_id])
        elif text.has_news:
            self._ready.set()

    def heard_of_prompt(self, update: ChoiceUpdate) -> None:
        self.num_cached_tokens = update.num_cached_tokens
        if update.queue_s is not None:
            self.metrics.scheduled_s = self.metrics.arrived_s + update.queue_s
        rated = update.prompt_logprobs
        if rated is not None and len(rated) == self.num_prompt_tokens:
            self._rated_prompt = rated

    def _one_ended(self) -> None:
        self._num_running -= 1
        if self._num_running == 0:
            self.metrics.finished_s = time.perf_counter()
        self._ready.set()

    def engine_is_gone(self, error: EngineDeadError) -> None:
        self._error = error
        self._ready.set()


class _Receiver:
    """Gives the news of one choice to its text; see :class:`~gapless.server.received_news.ChoiceReceiver`.

    The link holds it, and it holds the generation weakly: one that was dropped is noticed here.
    """

    def __init__(self, generation: Generation, text: ChoiceText, abort: Callable[[Sequence[int]], None]) -> None:
        self.text = text
        self.choice_id = -1
        self._generation = weakref.ref(generation)
        self._abort = abort
        self._request_fields = request_fields()  # news come to whichever task reads them

    def accepted(self, choice_id: int) -> None:
        self.choice_id = choice_id

    def add_token(self, token: int) -> None:
        generation = self._listener()
        if generation is None:
            return
        try:
            self.text.add((token,))
        except Exception as error:
            self._text_failed(error)
        generation.heard(self, tokens=True, engine_ended_it=False)

    def add(self, update: ChoiceUpdate) -> None:
        generation = self._listener()
        if generation is None:
            return
        if self.text.index == 0:  # the others find the blocks of the first, which is nothing that was known before
            generation.heard_of_prompt(update)
        try:
            self._add(update)
        except Exception as error:
            self._text_failed(error)
        if update.finish_reason is not None:
            generation.metrics.num_preemptions += update.num_preemptions
        generation.heard(self, tokens=bool(update.token_ids), engine_ended_it=update.finish_reason is not None)

    def fail(self, error: EngineDeadError) -> None:
        generation = self._generation()
        if generation is not None:
            generation.engine_is_gone(error)

    def _listener(self) -> Generation | None:
        """Who wants to hear; where that is nobody any more the engine is told."""
        generation = self._generation()
        if generation is None:
            self._abort([self.choice_id])
        return None if self.text.finish_reason is not None else generation

    def _add(self, update: ChoiceUpdate) -> None:
        if update.finish_reason is None:
            self.text.add(update.token_ids, update.logprobs)
        else:
            self.text.end(
                update.finish_reason,
                update.token_ids,
                update.logprobs,
                stop_reason=update.stop_reason,
                error=update.error,
            )

    def _text_failed(self, error: Exception) -> None:
        """A fault of a tokenizer ends the request that met it, and not the news of all the others."""
        _log.error("the text of a request could not be made", exc_info=error, extra=self._request_fields)
        self.text.fail(f"the text could not be made: {type(error).__name__}")
