"""Options that the benchmarks share: :class:`BenchOptions`, and :func:`bench_options`, which adds them to a command."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from gapless.cli.options import ModelOption, QuietOption, VerboseOption, shared_options

__all__ = ["BenchOptions", "NewTokensOption", "PromptTokensOption", "bench_options"]

PromptTokensOption: TypeAlias = Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a prompt.")]
NewTokensOption: TypeAlias = Annotated[int, typer.Option("--new-tokens", help="Tokens to generate for each prompt.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What every benchmark is told, as it stood on the command line; ``engine`` has the engine's own options."""

    model: str
    depth: list[int]
    repeats: int
    seed: int
    json_file: Path | None
    picture: Path | None
    timelines: Path | None
    max_rows: int | None
    max_model_len: int | None
    quiet: bool
    verbose: bool
    engine: dict[str, Any]


def _common(
    *,
    model: ModelOption = "smollm2",
    depth: Annotated[
        list[int], typer.Option("--depth", "-d", help="Most steps in flight; several are compared: --depth 1 2 3.")
    ] = [1, 2],  # noqa: B006  # typer copies it
    repeats: Annotated[
        int, typer.Option("--repeats", help="Rounds, each with a fresh engine for every depth; medians are shown.")
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts, lengths and the order of depths.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures, with versions, hardware, command and date.")
    ] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the comparison (*.png or *.svg).")] = None,
    timelines: Annotated[
        Path | None, typer.Option("--timelines", help="A folder: draw the timeline of each depth's last round in it.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", help="Most requests on the device at once; as many as useful if unset.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Longest context; what the workload needs if unset.")
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Holds the options as a signature, in which typer reads them."""


# A prompt that is found in the cache is not computed, and nothing of it is measured.
_engine_options = shared_options(
    engine_defaults={"enable_prefix_caching": False},
    without_engine=["depth", "max_rows", "max_model_len", "max_waiting", "timeline"],
)


def bench_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the shared options and the engine's to a command, which gets them as ``options``.

    Args:
        without: shared options that mean nothing for this command; it gets their defaults.
    """
    every = list(inspect.signature(_common, eval_str=True).parameters.values())
    common = [parameter for parameter in every if parameter.name not in without]
    defaults = {parameter.name: parameter.default for parameter in every}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(*, engine: dict[str, Any], **given: Any) -> None:
            chosen = defaults | {parameter.name: given.pop(parameter.name) for parameter in common}
            command(options=BenchOptions(engine=engine, **chosen), **given)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        engine = inspect.Parameter("engine", inspect.Parameter.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature([*own, *common, engine])  # type: ignore[attr-defined]
        return _engine_options(run)

    return decorate
