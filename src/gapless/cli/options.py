"""Options that commands share, made from the dataclasses they fill: :func:`shared_options`.

A command writes parameters named ``engine`` and ``sampling``; on the command line each is an option a field. Names,
types and defaults are those of :class:`~gapless.EngineConfig` and :class:`~gapless.SamplingParams`, which also check
the values, so nothing is said twice.
"""

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import typer

from gapless.cli.console import UsageError
from gapless.config import EngineConfig
from gapless.errors import ConfigError, RequestError
from gapless.sampling_params import SamplingParams, unchosen

__all__ = [
    "ENGINE_HELP",
    "MODEL_HELP",
    "ChatTemplateOption",
    "GenerationConfigOption",
    "ModelOption",
    "QuietOption",
    "VerboseOption",
    "checked_engine",
    "checked_sampling",
    "flag_of",
    "read_chat_template",
    "shared_options",
]

MODEL_HELP = "A folder, a *.gguf file, 'smollm2', the hub's org/name[@revision], or with --load-format dummy a preset."
"""What ``--model`` takes, in a sentence."""
ModelOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=MODEL_HELP,
    ),
]
ChatTemplateOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--chat-template", help="Instead of the model's: a file, one of the model's templates by name, or Jinja source."
    ),
]
GenerationConfigOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--generation-config",
        help="auto takes defaults for sampling from the model's generation_config.json, none does not.",
    ),
]
QuietOption: TypeAlias = Annotated[
    bool, typer.Option("--quiet", "-q", help="Nothing on standard error but warnings and failures.")
]
VerboseOption: TypeAlias = Annotated[bool, typer.Option("--verbose", help="Show the traceback of a failure.")]

ENGINE_HELP: Mapping[str, str] = {
    "depth": "Most steps in flight: 1 waits for each, 2 overlaps host and device, 3 hides jitter as well.",
    "device": "auto, cuda or cpu.",
    "dtype": "auto (bf16 on CUDA, fp32 on a CPU), float32, bfloat16 or float16.",
    "load_format": "auto reads weights, dummy draws random ones.",
    "seed": "Seed of random weights.",
    "max_model_len": "Longest context in tokens; the largest that fits if not given.",
    "max_rows": "Most requests on the device at once.",
    "token_budget": "Most tokens in a step; if not given, 8192 offline on CUDA and 2048 elsewhere.",
    "chunk_size": "Most prompt tokens of one request in a step; the budget if not given.",
    "max_waiting": "Most requests queued.",
    "block_size": "Tokens in a KV block, a power of two.",
    "num_blocks": "KV blocks, instead of a size in bytes.",
    "kv_cache_memory_bytes": "Memory of the KV cache; what is free if not given.",
    "gpu_memory_utilization": "Share of the GPU's memory to use.",
    "cuda_graphs": "Replay decode steps as CUDA graphs; no effect on a CPU.",
    "enable_prefix_caching": "Reuse the KV cache of prompts that start alike.",
    "step_timeout_s": "Seconds after which a step that does not come back fails the engine.",
    "timeline": "Record when host and device worked on each step.",
}
"""What each field of ``EngineConfig`` that is an option does, in a sentence."""
_SAMPLING_HELP = {
    "n": "Answers to each prompt.",
    "temperature": "0 is greedy; higher is more varied.",
    "top_k": "Choose among the k most likely tokens; 0 for all.",
    "top_p": "Choose among the fewest tokens that reach this probability.",
    "min_p": "Drop tokens less likely than this share of the most likely one.",
    "presence_penalty": "Lower the logits of tokens that the answer has.",
    "frequency_penalty": "Lower them once for each time that it has them.",
    "repetition_penalty": "Make tokens of prompt and answer less likely; 1 is off.",
    "seed": "Makes sampling repeatable.",
    "max_tokens": "Most tokens of an answer.",
    "min_tokens": "Fewest tokens before an answer may end.",
    "stop": "End before this text (may be given several times).",
    "include_stop_str_in_output": "End after the text of --stop instead.",
    "stop_token_ids": "End at this token id (may be given several times).",
    "ignore_eos": "Go on past the end token.",
    "skip_special_tokens": "Leave special tokens out of the text.",
}
_FLAGS = {("engine", "seed"): "--weights-seed", ("sampling", "stop_token_ids"): "--stop-token-id"}


def shared_options(
    *,
    sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    without: Collection[str] = (),
    engine_defaults: Mapping[str, Any] = MappingProxyType({}),
    without_engine: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a command's parameters ``engine`` and ``sampling`` into options, and hand them over as two mappings.

    A command may have only one of the two.

    The mapping ``sampling`` holds what the user chose and, marked as such, this command's defaults: those of the
    model come between the two.

    Args:
        sampling_defaults: what this command's defaults are where they differ from those of ``SamplingParams``.
        without: sampling options that make no sense for this command.
        engine_defaults, without_engine: the same for the engine's options.
    """
    defaults = {name: unchosen(value) for name, value in sampling_defaults.items()}
    sampling_help = {name: text for name, text in _SAMPLING_HELP.items() if name not in without}
    engine_help = {name: text for name, text in ENGINE_HELP.items() if name not in without_engine}
    every_group = {
        "engine": _parameters("engine", EngineConfig, engine_help, engine_defaults),
        "sampling": _parameters("sampling", SamplingParams, sampling_help, sampling_defaults),
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        wanted = inspect.signature(command).parameters
        groups = {group: parameters for group, parameters in every_group.items() if group in wanted}

        @wraps(command)
        def run(*, context: typer.Context, **given: Any) -> None:
            for group, parameters in groups.items():
                values = {p.name.removeprefix(f"{group}_"): given.pop(p.name) for p in parameters}
                given[group] = values if group == "engine" else defaults | _chosen(values, context)
            command(**given)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name not in groups]
        shared = [parameter for parameters in groups.values() for parameter in parameters]
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        signature = inspect.Signature([context, *own, *shared])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": None}
        return run

    return decorate


def checked_engine(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the engine's options; a wrong value is wrong use."""
    try:
        EngineConfig(**options)
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return options


def checked_sampling(options: Mapping[str, Any]) -> SamplingParams:
    """Make sampling parameters; a wrong value is wrong use."""
    try:
        return SamplingParams(**options)
    except RequestError as error:
        raise UsageError(str(error)) from error


def read_chat_template(value: str | None) -> str | None:
    """The text of a template's file, or the value itself where it is no file."""
    if value is None or "\n" in value or len(value) > 255 or not Path(value).is_file():
        return value
    return Path(value).read_text(encoding="utf-8")


def flag_of(group: Literal["engine", "sampling"], name: str) -> str:
    """The flag of a field: of an ``EngineConfig`` or of a ``SamplingParams``."""
    return _FLAGS.get((group, name), "--" + name.removesuffix("_s").replace("_", "-"))


def _chosen(values: Mapping[str, Any], context: typer.Context) -> dict[str, Any]:
    """The sampling options that stand on the command line."""

    def is_default(name: str) -> bool:
        source = context.get_parameter_source(f"sampling_{name}")
        return source is None or source.name.startswith("DEFAULT")

    return {name: value for name, value in values.items() if not is_default(name)}


def _parameters(
    group: Literal["engine", "sampling"],
    dataclass: type[Any],
    help_texts: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> list[inspect.Parameter]:
    hints = get_type_hints(dataclass)
    parameters = []
    for field in fields(dataclass):
        if field.name not in help_texts:
            continue
        name = f"{group}_{field.name}"
        default = defaults.get(field.name, field.default)
        flag = flag_of(group, field.name)
        if hints[field.name] is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        option = typer.Option(flag, help=help_texts[field.name], rich_help_panel=f"{group.capitalize()} options")
        kind = _option_type(hints[field.name])
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=list(default) if isinstance(default, tuple) else default,
                annotation=Annotated[kind, option],
            )
        )
    return parameters


def _option_type(hint: Any) -> Any:
    """What typer should parse: choices are checked by the dataclass, whose message names them."""
    if get_origin(hint) is Literal:
        return str
    if hint == str | Sequence[str] | None:
        return list[str]
    if isinstance(hint, types.UnionType) or hint in (bool, int, float, str):
        return hint
    return list[get_args(hint)[0]]  # type: ignore[misc]
