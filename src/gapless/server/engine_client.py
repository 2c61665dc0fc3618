"""A model that answers from another process: :class:`ServedModelClient`, what the endpoints of the server use.

Prompts are checked and tokenised here, by the same code as in :class:`gapless.LLM`; ids go to the engine process, ids
come back, and :class:`~gapless.server.generation.Generation` makes the text. It belongs to the event loop in which it
was started, and only that loop's thread may call it.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, get_args

from gapless.config import EngineConfig
from gapless.errors import ConfigError, EngineDeadError, RequestError
from gapless.generation_defaults import GenerationConfigMode, override_defaults
from gapless.model.checkpoint import TokenizerSource
from gapless.model.loading import Progress
from gapless.prompts import PreparedPrompt, is_long_prompt, prepare_prompt
from gapless.sampling_params import ALL_LOGPROBS, MAX_LOGPROBS, SamplingParams
from gapless.served_model import TextSide
from gapless.server.encoding import MAX_NEWS_BYTES, packed_ids
from gapless.server.engine_link import EngineLink
from gapless.server.generation import Generation
from gapless.server.messages import EngineStats, Ready, StartEngine, Submit, WireParams
from gapless.text.chat import JsonValue, Message
from gapless.text.tokenizer import Tokenizer

__all__ = ["ServedModelClient"]

_log = logging.getLogger("gapless")

_BYTES_PER_RATED_TOKEN: Final = 32  # and eight for each of the most likely tokens


class ServedModelClient:
    """A model in an engine process, and its tokenizer in this one. Made by :meth:`start`.

    Attributes:
        served_model_names: what requests may call it; the first is the one that answers carry.
    """

    def __init__(self, link: EngineLink, ready: Ready, text: TextSide, served_model_names: Sequence[str]) -> None:
        self.served_model_names = tuple(served_model_names)
        self._link = link
        self._ready = ready
        self._text = text

    @classmethod
    async def start(
        cls,
        model: str | Path,
        config: EngineConfig | None = None,
        *,
        served_model_names: Sequence[str] = (),
        chat_template: str | None = None,
        generation_config: GenerationConfigMode = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Start an engine process and wait until it is ready.

        Call it in a thread that lives as long as the engine, such as the main one: the kernel ends the process with
        the thread that started it. Cancelling it ends the process.

        Args:
            model: a folder, a ``*.gguf`` file, ``smollm2``, a preset (with ``load_format="dummy"``), or a hub name.
            config: the engine's options; ``None`` for the defaults with the timeline on.
            served_model_names: names for requests; none for ``model`` itself.
            chat_template, generation_config, override_generation_config: as for :class:`gapless.AsyncLLM`.
            progress: told about the stages of loading, in the event loop.

        Raises:
            ConfigError: an unknown or impossible option.
            CheckpointError: the model is missing, damaged or not supported.
            EngineDeadError: the process ended otherwise.
        """
        if generation_config not in get_args(GenerationConfigMode):
            raise ConfigError(f"generation_config={generation_config!r} is unknown; use one of auto, none")
        overrides = override_generation_config or {}
        override_defaults(overrides)  # before a process is started
        link = EngineLink()
        ready = await link.start(
            StartEngine(
                model=str(model),
                is_path=isinstance(model, Path),
                config=(config or EngineConfig(timeline=True)).for_streams(),
                log_level=_log.getEffectiveLevel(),
            ),
            progress,
        )
        try:
            if progress is not None:
                progress.stage("load tokenizer")
            raw = ready.generation_config if generation_config == "auto" else {}
            text = await asyncio.to_thread(_load_text, ready, raw, overrides, chat_template)
            link.check_alive()
        except BaseException:
            await link.close(timeout_s=0)
            raise
        return cls(link, ready, text, served_model_names or (str(model),))

    # --- what the model is --------------------------------------------------------------------------------------------

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.served_model_names[0]

    @property
    def max_model_len(self) -> int:
        """The longest context of one request, in tokens: the least of the model's, the user's and the cache's."""
        return self._ready.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding: token ids are below it."""
        return self._ready.vocab_size

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self._ready.kv_capacity

    @property
    def device(self) -> str:
        """Where the model runs, as torch names it."""
        return self._ready.device

    @property
    def dtype(self) -> str:
        """Of weights and KV cache, as torch names it."""
        return self._ready.dtype

    @property
    def load_s(self) -> float:
        """Seconds that the engine took to load."""
        return self._ready.start_s

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Any thread may use it."""
        return self._text.tokenizer

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends an answer."""
        return self._text.eos_token_ids

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without sampling parameters gets."""
        return self.resolve_sampling_params(SamplingParams())

    def resolve_sampling_params(self, params: SamplingParams) -> SamplingParams:
        """Fill the fields that were left out with the model's defaults; :meth:`submit` does it by itself."""
        return self._text.resolve_sampling_params(params)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def prepare_prompt(self, prompt: object, *, field: str = "prompt") -> PreparedPrompt:
        """Check and tokenise a prompt (text, token ids, or a mapping), a long one in a thread.

        Raises:
            RequestError: as :func:`gapless.prompts.prepare_prompt`; messages call the prompt ``field``.
        """
        if is_long_prompt(prompt):
            return await asyncio.to_thread(prepare_prompt, prompt, self._text.tokenizer, field=field)
        return prepare_prompt(prompt, self._text.tokenizer, field=field)

    async def prepare_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[JsonValue] | None = None,
        chat_template_kwargs: Mapping[str, JsonValue] | None = None,
    ) -> PreparedPrompt:
        """Render and tokenise a chat in a thread; options as for :meth:`gapless.LLM.chat`.

        Raises:
            RequestError: the messages are not valid, or the template refuses them.
        """
        return await asyncio.to_thread(
            self._text.prepare_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_variables=chat_template_kwargs,
        )

    async def submit(self, prompt: PreparedPrompt, params: SamplingParams, *, salt: bytes = b"") -> Generation:
        """Queue a request. Close what comes back, or use it as ``async with``: that ends the request.

        Args:
            prompt: from :meth:`prepare_prompt` or :meth:`prepare_chat`.
            params: fields left out take the model's defaults.
            salt: with the prompt's own, part of every prefix-cache key: requests share blocks only under equal salts.

        Raises:
            RequestError: the request cannot be served (:class:`PromptTooLongError`: it never fits;
                :class:`QueueFullError`: too many wait). Nothing was queued.
            EngineDeadError: the engine is gone.
        """
        self._link.check_alive()
        params = self.resolve_sampling_params(params)
        self._check_logprobs(prompt, params)
        request = self._text.engine_request(prompt, params, streams=True)
        generation = Generation(
            prompt,
            params,
            self._text.tokenizer,
            make_stop_check=self._text.stop_check_maker(params),
            abort=self._link.abort,
        )
        submit = Submit(
            call=0,
            prompt=packed_ids(request.prompt_token_ids),
            params=WireParams.of(params),
            stop_token_ids=sorted(request.stop_token_ids),
            bad_words=[list(word) for word in request.bad_words],
            salt=len(salt).to_bytes(4, "little") + salt + prompt.salt if salt else prompt.salt,
        )
        await self._link.submit(submit, generation.receivers)
        return generation

    # --- the engine ---------------------------------------------------------------------------------------------------

    async def counters(self) -> EngineStats:
        """The engine's counts at this moment.

        Raises:
            EngineDeadError: the engine is gone.
        """
        return await self._link.counters()

    @property
    def num_live(self) -> int:
        """Choices that have been queued and have not ended."""
        return self._link.num_live

    @property
    def alive(self) -> bool:
        """Whether requests are taken."""
        try:
            self._link.check_alive()
        except EngineDeadError:
            return False
        return True

    @property
    def died(self) -> asyncio.Event:
        """Set when the engine is gone, asked for or not; :attr:`error` says why."""
        return self._link.died

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine is gone."""
        return self._link.error

    @property
    def engine_pid(self) -> int | None:
        """The engine's process id."""
        return self._link.pid

    async def drain(self, timeout_s: float) -> None:
        """Wait until no request runs; those that do after ``timeout_s`` end as aborted. Later ones are still taken."""
        await self._link.drain(timeout_s)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the engine process; what runs ends as aborted. After ``timeout_s`` it is killed."""
        await self._link.close(timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @staticmethod
    def _check_logprobs(prompt: PreparedPrompt, params: SamplingParams) -> None:
        if params.logprobs == ALL_LOGPROBS:
            raise RequestError(
                f"logprobs={ALL_LOGPROBS} (the whole vocabulary) is only to be had in process, from LLM and AsyncLLM; "
                f"ask for at most {MAX_LOGPROBS}"
            )
        if params.prompt_logprobs is not None:
            num_bytes = len(prompt.token_ids) * (_BYTES_PER_RATED_TOKEN + 8 * params.prompt_logprobs)
            if num_bytes > MAX_NEWS_BYTES // 2:
                raise RequestError(
                    f"prompt_logprobs={params.prompt_logprobs} for {len(prompt.token_ids)} tokens makes {num_bytes} "
                    f"bytes; the limit is {MAX_NEWS_BYTES // 2}: ask for fewer, or shorten the prompt"
                )


def _load_text(
    ready: Ready, generation_config: Mapping[str, Any], overrides: Mapping[str, Any], chat_template: str | None
) -> TextSide:
    """Load the tokenizer that the engine names; takes up to seconds."""
    source = ready.tokenizer_source
    return TextSide(
        TokenizerSource(
            kind=source.kind,
            path=None if source.path is None else Path(source.path),
            eos_token_id=source.eos_token_id,
        ),
        vocab_size=ready.vocab_size,
        eos_token_ids=ready.eos_token_ids,
        generation_config=generation_config,
        overrides=overrides,
        chat_template=chat_template,
    )
