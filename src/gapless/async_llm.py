"""The asynchronous Python API: :class:`AsyncLLM`.

Each request has a stream. The engine's thread hands the news of a step to the event loop in one call, whatever the
number of requests; the loop puts them into the streams; each consumer takes what has gathered since it last looked.
So a slow consumer gets fewer and larger outputs, never an incomplete one, and holds up nobody.

A request ends with its generator: when that is closed, cancelled or dropped, the request is aborted at the next step.
"""

import asyncio
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from gapless.config import EngineConfig
from gapless.engine.engine import Engine
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError, RequestError
from gapless.generation_defaults import GenerationConfigMode
from gapless.model.loading import Progress
from gapless.output_building import GrowingOutput
from gapless.outputs import RequestOutput
from gapless.prompts import PreparedPrompt, Prompt, is_long_prompt, prepare_prompt
from gapless.sampling.logits_hook import LogitsProcessor
from gapless.sampling_params import SamplingParams
from gapless.served_model import EngineOptions, ServedModel
from gapless.text.chat import JsonValue, Message

__all__ = ["AsyncLLM"]

MAX_REQUEST_ID_CHARACTERS = 256
_News = TypeVar("_News")


class _Stream:
    """News of one request on their way to its consumer. Used by its event loop's thread only."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._updates: list[RequestUpdate] = []
        self._died = False
        self._ready = asyncio.Event()

    def put(self, update: RequestUpdate) -> None:
        self._updates.append(update)
        self._ready.set()

    def fail(self) -> None:
        self._died = True
        self._ready.set()

    async def take(self) -> list[RequestUpdate]:
        """Wait for news and return all there are; nothing if the engine has died and no more will come."""
        await self._ready.wait()
        updates, self._updates = self._updates, []
        if not self._died:
            self._ready.clear()
        return updates


class _StreamSink:
    """Gives the news of each step to the event loops whose streams wait for them: one call a loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[int, _Stream] = {}
        self.engine: weakref.ref[Engine] | None = None  # weak: the engine holds its sink

    def register(self, request_ids: Sequence[int], stream: _Stream) -> None:
        with self._lock:
            self._streams.update(dict.fromkeys(request_ids, stream))

    def forget(self, request_ids: Sequence[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._streams.pop(request_id, None)

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestUpdate]]](list)
        with self._lock:
            for update in updates:
                stream = self._streams.get(update.request_id)
                if stream is not None:
                    by_loop[stream.loop].append((stream, update))
        for loop, news in by_loop.items():
            if not _call_in(loop, _deliver, news):
                self._abandon([update.request_id for _, update in news])

    def engine_died(self, error: EngineDeadError) -> None:
        by_loop = defaultdict[asyncio.AbstractEventLoop, list[_Stream]](list)
        with self._lock:
            for stream in self._streams.values():
                by_loop[stream.loop].append(stream)
            self._streams.clear()
        for loop, streams in by_loop.items():
            _call_in(loop, _fail, streams)

    def _abandon(self, request_ids: list[int]) -> None:
        """End requests whose event loop was closed before their generators were."""
        self.forget(request_ids)
        engine = self.engine() if self.engine is not None else None
        if engine is not None:
            engine.abort(request_ids)


class AsyncLLM(ServedModel):
    """A model for requests that come and go, each with a stream of its own.

    ::

        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The sky is", SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)

    It may be made anywhere, before there is an event loop or in a thread beside it.

    Args:
        model: a folder, a ``*.gguf`` file, ``smollm2``, a preset (with ``load_format="dummy"``), or a hub name.
        chat_template: Jinja source, or the name of one of the checkpoint's templates, instead of its default.
        generation_config: ``auto`` takes sampling defaults from the checkpoint's ``generation_config.json``, ``none``
            does not.
        override_generation_config: sampling defaults by the names of that file; they win over it.
        logits_processor: changes the logits of every step on the device, see :mod:`gapless.sampling.logits_hook`.
        progress: told about the stages of loading.
        options: of the engine: ``depth`` and the other fields of :class:`EngineConfig`.

    Raises:
        ConfigError: an unknown or impossible option.
        CheckpointError: the model is missing, damaged or not supported.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        chat_template: str | None = None,
        generation_config: GenerationConfigMode = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        logits_processor: LogitsProcessor | None = None,
        progress: Progress | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._sink = _StreamSink()
        super().__init__(
            model,
            self._sink,
            EngineConfig.from_options(dict(options)).for_streams(),
            chat_template=chat_template,
            generation_config=generation_config,
            override_generation_config=override_generation_config,
            logits_processor=logits_processor,
            progress=progress,
        )
        self._sink.engine = weakref.ref(self._engine)

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt; the request starts when the first output is asked for.

        Args:
            prompt: text, token ids, or a mapping (see :class:`~gapless.prompts.PromptMapping`).
            sampling_params: how to sample.
            request_id: reported back in the outputs, cut to 256 characters; ``None`` makes one. Requests with equal
                ids are requests of their own.

        Yields:
            Outputs with all text and ids so far of all choices, the last one ``finished``. What came while the consumer
            was busy is in the next one. A request that failed on its own has the ``finish_reason`` ``"error"``.

        Raises:
            RequestError: the request cannot be served.
            EngineDeadError: the engine has ended; the cause is chained.
        """
        return self._stream(
            lambda: prepare_prompt(prompt, self._tokenizer), sampling_params, request_id, is_long=is_long_prompt(prompt)
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonValue] | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer a conversation; options as for :meth:`gapless.LLM.chat`, the rest as for :meth:`generate`."""
        return self._stream(
            lambda: self._text.prepare_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_variables=chat_template_kwargs,
            ),
            sampling_params,
            request_id,
            is_long=True,
        )

    async def aclose(self) -> None:
        """End the engine as :meth:`close` does, without holding up the event loop; running requests end as aborted."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _stream(
        self,
        prepare: Callable[[], PreparedPrompt],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        *,
        is_long: bool,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Prepare a prompt (a long one in a thread), run it, and abort it if this generator ends first."""
        if request_id is not None and not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, not {type(request_id).__name__}")
        [params] = self._text.params_list(sampling_params, 1)
        engine = self._engine
        prompt = await asyncio.to_thread(prepare) if is_long else prepare()
        stream = _Stream()
        choice_ids = engine.submit(
            [self._engine_request(prompt, params, streams=True)], lambda ids: self._sink.register(ids, stream)
        )
        finished = False
        try:
            shown_id = str(choice_ids[0]) if request_id is None else request_id[:MAX_REQUEST_ID_CHARACTERS]
            growing = GrowingOutput(shown_id, prompt, params, self._tokenizer, choice_ids)
            while not finished:
                updates = await stream.take()
                if not updates:
                    engine.check_alive()
                output = growing.add(updates)
                finished = output.finished
                yield output
        finally:
            self._sink.forget(choice_ids)
            if not finished:
                engine.abort(choice_ids)


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[_News], None], news: _News) -> bool:
    """Have a loop call back from its own thread; false if it is closed."""
    try:
        loop.call_soon_threadsafe(callback, news)
    except RuntimeError:
        return False
    return True


def _deliver(news: list[tuple[_Stream, RequestUpdate]]) -> None:
    for stream, update in news:
        stream.put(update)


def _fail(streams: list[_Stream]) -> None:
    for stream in streams:
        stream.fail()
