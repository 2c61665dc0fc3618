"""The blocking Python API: :class:`LLM`.

Prompts go to the engine as one command, so what its steps hold depends on the prompts alone and never on the clock.
The caller's thread then sleeps until the engine's thread has told it of the last end, and makes the text. Any number
of threads may use one object; each waits for its own requests only.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from gapless.config import EngineConfig
from gapless.engine.request import EngineRequest
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError, QueueFullError, RequestError
from gapless.generation_defaults import GenerationConfigMode
from gapless.generation_progress import GenerationProgress
from gapless.model.loading import Progress
from gapless.output_building import final_output
from gapless.outputs import RequestOutput
from gapless.prompts import PreparedPrompt, Prompt, is_single_prompt, prepare_prompt, prompt_list
from gapless.sampling.logits_hook import LogitsProcessor
from gapless.sampling_params import SamplingParams
from gapless.served_model import EngineOptions, ServedModel
from gapless.text.chat import JsonValue, Message

__all__ = ["LLM"]

_ABORT_WAIT_S = 10.0
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class _Batch:
    """The choices of the requests of one call. The engine's thread counts their ends; the caller's thread waits."""

    def __init__(self, size: int) -> None:
        self.ids: list[int] = []
        self.ends: dict[int, RequestUpdate] = {}
        self.engine_died = False
        self.done = threading.Event()
        self.size = size

    def end(self, update: RequestUpdate) -> None:
        self.ends[update.request_id] = update
        if len(self.ends) == self.size:
            self.done.set()

    def fail(self) -> None:
        self.engine_died = True
        self.done.set()


class _BatchSink:
    """Gives each end to the batch that waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}

    def register(self, request_ids: list[int], batch: _Batch) -> None:
        batch.ids = request_ids
        with self._lock:
            self._batches.update(dict.fromkeys(request_ids, batch))

    def forget(self, request_ids: list[int]) -> None:
        with self._lock:
            for request_id in request_ids:
                self._batches.pop(request_id, None)

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        with self._lock:
            ended = [(self._batches.pop(update.request_id, None), update) for update in updates]
        for batch, update in ended:
            if batch is not None:
                batch.end(update)

    def engine_died(self, error: EngineDeadError) -> None:
        with self._lock:
            batches = set(self._batches.values())
            self._batches.clear()
        for batch in batches:
            batch.fail()


class LLM(ServedModel):
    """A model for batches of prompts.

    ::

        with LLM("smollm2") as llm:
            outputs = llm.generate(["The sky is", "Once upon a time"], SamplingParams(temperature=0, max_tokens=32))
        print(outputs[0].outputs[0].text)

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
        self._sink = _BatchSink()
        super().__init__(
            model,
            self._sink,
            EngineConfig.from_options(dict(options)),
            chat_template=chat_template,
            generation_config=generation_config,
            override_generation_config=override_generation_config,
            logits_processor=logits_processor,
            progress=progress,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one prompt or a list of them, each text, token ids, or a mapping (see
                :class:`~gapless.prompts.PromptMapping`). A list of integers is one prompt.
            sampling_params: for all prompts, or one for each. A ``seed`` in one object is the seed of every prompt, so
                that ``generate([p], s)`` and ``generate([p], [s])`` are the same. Fields left out take the model's
                defaults, see :meth:`get_default_sampling_params`.
            use_tqdm: show progress on standard error; ``None`` shows it where that is a terminal.

        Returns:
            One output a prompt, in the order of the prompts. A request that failed on its own (non-finite logits) has
            the ``finish_reason`` ``"error"`` and says why in ``outputs[0].error``; the others are unaffected.

        Raises:
            RequestError: a prompt or its parameters cannot be served; nothing of the list runs.
            EngineDeadError: the engine has ended; the cause is chained.
        """
        if is_single_prompt(prompts):
            return self._run([prepare_prompt(prompts, self._tokenizer)], sampling_params, use_tqdm, name=None)
        prepared = [
            prepare_prompt(prompt, self._tokenizer, field=f"prompts[{index}]")
            for index, prompt in enumerate(prompt_list(prompts))
        ]
        return self._run(prepared, sampling_params, use_tqdm, name="prompts")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonValue] | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered by the model's chat template.

        Text of control tokens typed inside a message stays plain text. To continue the last message, pass
        ``add_generation_prompt=False, continue_final_message=True``.

        Args:
            messages: mappings with ``role`` and ``content``, or a list of such conversations.
            sampling_params: as for :meth:`generate`.
            use_tqdm: as for :meth:`generate`.
            add_generation_prompt: end the prompt with the header of the answer.
            continue_final_message: end it inside the last message, so that the model goes on with it.
            tools: JSON schemas of functions the model may call.
            chat_template_kwargs: what else the template should see, such as ``enable_thinking``.

        Returns and raises as :meth:`generate`; a template that refuses the messages raises :class:`RequestError`.
        """

        def prepare(conversation: Any) -> PreparedPrompt:
            return self._text.prepare_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                template_variables=chat_template_kwargs,
            )

        if not _is_conversation_list(messages):
            return self._run([prepare(messages)], sampling_params, use_tqdm, name=None)
        prepared = [
            _naming(f"conversations[{index}]", prepare, conversation) for index, conversation in enumerate(messages)
        ]
        return self._run(prepared, sampling_params, use_tqdm, name="conversations")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[PreparedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
        *,
        name: str | None,
    ) -> list[RequestOutput]:
        """Run prepared prompts; ``name`` is what a list of them is called in messages."""
        params = self._text.params_list(sampling_params, len(prompts))
        if not prompts:
            return []
        requests = [
            self._engine_request(prompt, wanted, streams=False) for prompt, wanted in zip(prompts, params, strict=True)
        ]
        batch = self._wait_for(requests, use_tqdm, name)
        ids = iter(batch.ids)
        outputs = []
        for prompt, wanted in zip(prompts, params, strict=True):
            ends = [batch.ends[choice_id] for choice_id in islice(ids, wanted.n)]
            outputs.append(final_output(str(ends[0].request_id), prompt, wanted, self._tokenizer, ends))
        return outputs

    def _wait_for(self, requests: list[EngineRequest], use_tqdm: bool | None, name: str | None) -> _Batch:
        engine = self._engine
        batch = _Batch(sum(request.params.n for request in requests))
        try:
            try:
                engine.submit(requests, lambda ids: self._sink.register(ids, batch))
            except RequestError as error:
                if name is None or isinstance(error, QueueFullError):
                    raise
                for index, request in enumerate(requests):
                    _naming(f"{name}[{index}]", engine.limits.check, request)
                raise
            with GenerationProgress.shown(use_tqdm, total=batch.size, counters=engine.counters) as progress:
                while not batch.done.wait(progress.interval_s):
                    progress.update(len(batch.ends))
        except BaseException:
            # Ctrl-C above all: the requests are gone, and their blocks free, when the caller sees it.
            if batch.ids:
                engine.abort(batch.ids)
                batch.done.wait(_ABORT_WAIT_S)
            raise
        finally:
            self._sink.forget(batch.ids)
        if batch.engine_died:
            engine.check_alive()
        return batch


def _is_conversation_list(messages: object) -> bool:
    """Whether this is a list of conversations, each a list itself."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        return False
    return isinstance(messages[0], Sequence) and not isinstance(messages[0], str | bytes)


def _naming(name: str, call: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
    """Call, and put the name of the list's item before the message of a refusal."""
    try:
        return call(argument)
    except RequestError as error:
        raise type(error)(f"{name}: {error}") from error
