"""A model that answers: :class:`ServedModel`, what the blocking and the asynchronous API have in common.

It owns the engine and the tokenizer, from the model's name to the end of the engine's threads, and knows how a prompt
becomes a request. Any thread may call it. Nothing global is touched: no signal handlers, no settings of torch.

The engine's thread never refers to this object, only to the sink that hears its news. So dropping the last reference
ends the engine, as :meth:`ServedModel.close` and the end of a ``with`` block do.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from gapless.config import DeviceName, EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.engine import Engine, EngineCounters, OutputSink
from gapless.engine.request import EngineRequest
from gapless.errors import ConfigError, EngineDeadError
from gapless.generation_defaults import GenerationConfigMode, file_defaults, override_defaults
from gapless.model.checkpoint import TokenizerSource
from gapless.model.loading import Progress
from gapless.prompts import PreparedPrompt, params_list
from gapless.sampling.logits_hook import LogitsProcessor
from gapless.sampling_params import SamplingParams
from gapless.text.bad_words import bad_word_ids
from gapless.text.chat import JsonValue, Message
from gapless.text.stop_strings import StopStringCheck
from gapless.text.tokenizer import Tokenizer, load_tokenizer
from gapless.timeline.timeline import Timeline

__all__ = ["EngineOptions", "ServedModel", "TextSide"]

_log = logging.getLogger("gapless")


class EngineOptions(TypedDict, total=False):
    """The options of :class:`~gapless.EngineConfig` as keywords; see there for what each of them does."""

    depth: int
    device: DeviceName
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["auto", "dummy"]
    seed: int
    max_model_len: int | None
    max_rows: int
    token_budget: int | None
    chunk_size: int | None
    max_waiting: int
    block_size: int
    num_blocks: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    cuda_graphs: bool
    enable_prefix_caching: bool
    step_timeout_s: float
    timeline: bool


class TextSide:
    """How a prompt and parameters become an engine's request, for one model. It needs no engine in its process.

    Args:
        source: where the checkpoint's tokenizer is.
        vocab_size: rows of the model's embedding.
        eos_token_ids: those that the checkpoint names.
        generation_config: the raw ``generation_config.json``, for sampling defaults.
        overrides: sampling defaults of the user that win over it, by the same names.
        chat_template: Jinja source, or the name of one of the checkpoint's templates, instead of its default.

    Raises:
        ConfigError: the chat template or the tokenizer does not go with the model.
        CheckpointError: the tokenizer or a sampling default of the checkpoint is damaged.
    """

    def __init__(
        self,
        source: TokenizerSource,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        generation_config: Mapping[str, Any],
        overrides: Mapping[str, Any],
        chat_template: str | None,
    ) -> None:
        named_by_file = file_defaults(generation_config, overrides)
        self._sampling_defaults = {**named_by_file, **override_defaults(overrides)}
        self.tokenizer = load_tokenizer(source, vocab_size=vocab_size, chat_template=chat_template)
        if named_by_file:
            shown = ", ".join(f"{name}={value}" for name, value in named_by_file.items())
            _log.info("sampling defaults from generation_config.json: %s (generation_config='none': without)", shown)
        named = {*eos_token_ids, self.tokenizer.eos_token_id}
        self.eos_token_ids = frozenset(i for i in named if i is not None and 0 <= i < vocab_size)

    def resolve_sampling_params(self, params: SamplingParams) -> SamplingParams:
        """Fill the fields that were left out with the model's defaults."""
        return params.with_defaults(self._sampling_defaults)

    def params_list(self, given: object, num_prompts: int) -> list[SamplingParams]:
        """One complete :class:`SamplingParams` for each prompt; see :func:`gapless.prompts.params_list`."""
        params = params_list(given, num_prompts)
        resolved = {id(each): self.resolve_sampling_params(each) for each in params}
        return [resolved[id(each)] for each in params]

    def engine_request(self, prompt: PreparedPrompt, params: SamplingParams, *, streams: bool) -> EngineRequest:
        """The request for a prompt under complete parameters, without a judge of its text."""
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        return EngineRequest(
            prompt_token_ids=prompt.token_ids,
            params=params,
            stop_token_ids=eos.union(params.stop_token_ids),
            streams=streams,
            bad_words=bad_word_ids(params.bad_words, self.tokenizer),
            salt=prompt.salt,
        )

    def stop_check_maker(self, params: SamplingParams) -> Callable[[], StopStringCheck] | None:
        """What makes the judge of a choice's text, for parameters with stop strings."""
        if not params.stops:
            return None
        return partial(
            StopStringCheck,
            self.tokenizer,
            params.stops,
            skip_special_tokens=params.skip_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def prepare_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[JsonValue] | None,
        template_variables: Mapping[str, JsonValue] | None,
    ) -> PreparedPrompt:
        """Render and tokenise a chat; see :meth:`gapless.text.tokenizer.Tokenizer.encode_chat`."""
        chat = self.tokenizer.rendered_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_variables=template_variables,
        )
        return PreparedPrompt(token_ids=chat.token_ids(), text=chat.text())


class ServedModel:
    """A model, its tokenizer and a running engine.

    Args:
        model: a folder, a ``*.gguf`` file, ``smollm2``, a preset (with ``load_format="dummy"``), or a hub name.
        sink: hears the engine's news, in the engine's thread. It must not refer to this object.
        config: the engine's options.
        chat_template: Jinja source, or the name of one of the checkpoint's templates, instead of its default.
        generation_config: ``auto`` takes sampling defaults from the checkpoint's ``generation_config.json``, ``none``
            does not.
        override_generation_config: sampling defaults by the names of that file; they win over it.
        logits_processor: changes the logits of every step on the device.
        progress: told about the stages of loading.

    Raises:
        ConfigError: an unknown or impossible option.
        CheckpointError: the model is missing, damaged or not supported.
    """

    def __init__(
        self,
        model: str | Path,
        sink: OutputSink,
        config: EngineConfig,
        *,
        chat_template: str | None,
        generation_config: GenerationConfigMode,
        override_generation_config: Mapping[str, Any] | None,
        logits_processor: LogitsProcessor | None,
        progress: Progress | None,
    ) -> None:
        if generation_config not in get_args(GenerationConfigMode):
            raise ConfigError(f"generation_config={generation_config!r} is unknown; use one of auto, none")
        overrides = override_generation_config or {}
        override_defaults(overrides)  # before anything is loaded
        self._config = config
        built = build_engine(model, config, sink, progress=progress, logits_processor=logits_processor)
        self._finalizer = weakref.finalize(self, _end, built.engine)
        try:
            if progress is not None:
                progress.stage("load tokenizer")
            self._text = TextSide(
                built.loaded.tokenizer_source,
                vocab_size=built.loaded.spec.vocab_size,
                eos_token_ids=built.loaded.eos_token_ids,
                generation_config=built.loaded.generation_config if generation_config == "auto" else {},
                overrides=overrides,
                chat_template=chat_template,
            )
        except BaseException:
            self._finalizer()
            raise
        self._tokenizer = self._text.tokenizer
        self._max_model_len = built.max_model_len
        recorder = built.engine.timeline
        self._timeline = None if recorder is None else Timeline(recorder)
        self._built: BuiltEngine | None = built

    @property
    def config(self) -> EngineConfig:
        """The engine's options."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, under the name that users of vLLM know."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling parameters gets: defaults of the model, and built-in ones for the rest."""
        return self.resolve_sampling_params(SamplingParams())

    def resolve_sampling_params(self, params: SamplingParams) -> SamplingParams:
        """Fill the fields that were left out with the model's defaults, as every request's are filled."""
        return self._text.resolve_sampling_params(params)

    @property
    def max_model_len(self) -> int:
        """The longest context of one request, in tokens: the least of the model's, the user's and the cache's."""
        return self._max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an answer: those of the generation config, the config and the tokenizer together."""
        return self._text.eos_token_ids

    @property
    def timeline(self) -> Timeline:
        """What every step did and when, also after :meth:`close`.

        Raises:
            ConfigError: nothing was recorded, since the option ``timeline`` is off.
        """
        if self._timeline is None:
            raise ConfigError("timeline=False: nothing was recorded; make the model with timeline=True")
        return self._timeline

    def counters(self) -> EngineCounters:
        """The engine's counts at this moment.

        Raises:
            EngineDeadError: after :meth:`close`.
        """
        return self._engine.counters()

    def close(self) -> None:
        """End the engine: running requests are aborted, its threads end, memory is freed. A second call is nothing."""
        built, self._built = self._built, None
        if built is not None:
            self._finalizer.detach()
            built.engine.shutdown()

    @property
    def _engine(self) -> Engine:
        built = self._built
        if built is None:
            raise EngineDeadError("the engine was closed: make a new object")
        return built.engine

    def _engine_request(self, prompt: PreparedPrompt, params: SamplingParams, *, streams: bool) -> EngineRequest:
        request = self._text.engine_request(prompt, params, streams=streams)
        return replace(request, make_stop_check=self._text.stop_check_maker(params))


def _end(engine: Engine) -> None:
    """End an engine; only the main thread waits for it.

    The collector may run this on a thread that the engine itself waits for, which must not wait for the engine.
    """
    engine.shutdown(30.0 if threading.current_thread() is threading.main_thread() else 0.0)
