"""``gapless bench``: what this machine makes of the engine, depth by depth, with the same work for each.

Results (a table and what it says) go to standard output, progress to standard error. Anything that cannot work is
refused before a model is loaded. The exit code is 1 if depths that owe the same tokens gave different ones.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gapless.cli.bench_options import BenchOptions, NewTokensOption, PromptTokensOption, bench_options
from gapless.cli.bench_serve import serve
from gapless.cli.console import UsageError, reported
from gapless.cli.many_values import ManyValues
from gapless.cli.options import checked_engine
from gapless.errors import CheckpointError, GaplessError

if TYPE_CHECKING:
    from gapless.bench.comparison import Comparison
    from gapless.bench.figures import RunFigures
    from gapless.bench.model_facts import ModelFacts
    from gapless.bench.plan import Plan
    from gapless.bench.workloads import Workload
    from gapless.timeline.spans import Recording

__all__ = ["bench"]

_PIPE_COLUMNS = 160
_GROWTH_REQUESTS = [1, 8, 32, 64, 128, 256, 512]
_GROWTH_CONTEXTS = [1024, 4096, 8192, 32_768]

bench = typer.Typer(
    name="bench",
    help="Measure: steady decode, throughput, latency, and how a decode step grows. Depths are run side by side.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bench.command(cls=ManyValues)
@bench_options()
def decode(
    *,
    requests: Annotated[int, typer.Option("--requests", help="Requests, all at once.")] = 8,
    prompt_tokens: PromptTokensOption = 128,
    new_tokens: NewTokensOption = 128,
    options: BenchOptions,
) -> None:
    """Steady decode: equal requests, all at once, EOS ignored."""

    def workloads(facts: "ModelFacts") -> Iterable["Workload"]:
        from gapless.bench.workloads import Lengths, synthetic_workload

        yield synthetic_workload(
            requests=requests,
            prompt=Lengths(mean=prompt_tokens),
            new=Lengths(mean=new_tokens),
            vocab_size=facts.vocab_size,
            seed=options.seed,
        )

    _compare(options, workloads, _print_depths)


@bench.command(cls=ManyValues)
@bench_options()
def throughput(
    *,
    input_file: Annotated[
        Path | None, typer.Option("--input", "-i", help="Real prompts: a JSONL file as gapless generate takes it.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests (32 if unset), or the file's first so many lines.")
    ] = None,
    prompt_tokens: PromptTokensOption = 128,
    new_tokens: NewTokensOption = 64,
    spread: Annotated[
        float, typer.Option("--spread", help="Lengths lie within this share of --prompt-tokens and --new-tokens.")
    ] = 0.5,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let prompts of a file end at EOS; depths may then differ in work.")
    ] = False,
    options: BenchOptions,
) -> None:
    """Many requests of mixed length, all at once: prefill and decode share steps."""

    def workloads(facts: "ModelFacts") -> Iterable["Workload"]:
        from gapless.bench.workloads import Lengths, jsonl_workload, synthetic_workload

        prompt, new = Lengths(mean=prompt_tokens, spread=spread), Lengths(mean=new_tokens, spread=spread)
        if input_file is None:
            yield synthetic_workload(
                requests=32 if requests is None else requests,
                prompt=prompt,
                new=new,
                vocab_size=facts.vocab_size,
                seed=options.seed,
            )
        else:
            yield jsonl_workload(
                input_file,
                facts.load_tokenizer(),
                max_tokens=new_tokens,
                max_model_len=options.max_model_len or facts.context,
                eos_token_ids=facts.eos_token_ids if stop_at_eos else frozenset(),
                limit=requests,
            )

    _compare(options, workloads, _print_depths)


@bench.command(cls=ManyValues)
@bench_options()
def latency(
    *,
    requests: Annotated[
        list[int], typer.Option("--requests", help="Requests at once; several numbers are run one after another.")
    ] = [1],  # noqa: B006  # typer copies it
    prompt_tokens: PromptTokensOption = 128,
    new_tokens: NewTokensOption = 64,
    options: BenchOptions,
) -> None:
    """Time to first token, per token, between tokens and end to end, with every token streamed."""

    def workloads(facts: "ModelFacts") -> Iterable["Workload"]:
        from gapless.bench.workloads import Lengths, synthetic_workload

        for count in requests:
            yield synthetic_workload(
                requests=count,
                prompt=Lengths(mean=prompt_tokens),
                new=Lengths(mean=new_tokens),
                vocab_size=facts.vocab_size,
                seed=options.seed,
                streams=True,
            )

    _compare(options, workloads, _print_latency)


@bench.command(cls=ManyValues)
@bench_options(without=["depth", "repeats", "picture", "timelines", "max_rows", "max_model_len", "seed"])
def growth(
    *,
    requests: Annotated[
        list[int], typer.Option("--requests", help="Numbers of requests: the table's lines.")
    ] = _GROWTH_REQUESTS,
    contexts: Annotated[
        list[int], typer.Option("--contexts", help="Tokens of context a request: the table's columns.")
    ] = _GROWTH_CONTEXTS,
    steps: Annotated[int, typer.Option("--steps", help="Decode steps for each cell.")] = 32,
    budget_s: Annotated[
        float, typer.Option("--budget", help="Most seconds for a cell; one whose first step takes longer is not run.")
    ] = 10.0,
    options: BenchOptions,
) -> None:
    """How a decode step grows with requests and context, against the roofline, and the host's time beside it."""
    with reported(verbose=options.verbose, quiet=options.quiet):
        from gapless.bench.growth import GrowthPlan, measure_growth
        from gapless.bench.model_facts import read_model_facts
        from gapless.bench.progress import BenchProgress
        from gapless.bench.report import check_writable, growth_report, write_report
        from gapless.bench.tables import growth_table
        from gapless.bench.verdict import growth_lines
        from gapless.config import EngineConfig
        from gapless.engine.assembly import resolve_device

        with _wrong_use():
            if options.json_file is not None:
                check_writable(options.json_file, "--json")
            config = EngineConfig(**options.engine)
            plan = GrowthPlan(
                model=options.model,
                config=config,
                requests=tuple(requests),
                contexts=tuple(contexts),
                steps=steps,
                budget_s=budget_s,
            )
            device = resolve_device(config.device)
        read_model_facts(options.model, config.load_format)
        with BenchProgress(quiet=options.quiet) as progress:
            found = measure_growth(plan, progress)
        _console().print(growth_table(found))
        for line in growth_lines(found):
            print(line)
        if options.json_file is not None:
            write_report(options.json_file, growth_report(found, device))


@contextmanager
def _wrong_use() -> Iterator[None]:
    """What is refused in the block is wrong use of the command; a model that is not there is a failure."""
    try:
        yield
    except CheckpointError:
        raise
    except GaplessError as error:
        raise UsageError(str(error)) from error


def _compare(
    options: BenchOptions,
    workloads: Callable[["ModelFacts"], Iterable["Workload"]],
    show: Callable[["Comparison"], None],
) -> None:
    """Check everything, run all depths, and tell what came out."""
    with reported(verbose=options.verbose, quiet=options.quiet):
        # Not above: they import torch, for which `gapless --help` should not have to wait.
        from gapless.bench.comparison import compare_depths
        from gapless.bench.picture import draw_comparison
        from gapless.bench.progress import BenchProgress
        from gapless.bench.report import comparison_report, write_report
        from gapless.engine.assembly import resolve_device

        with _wrong_use():
            plan = _checked_plan(options, workloads)
            device = resolve_device(plan.config.device)
        with BenchProgress(quiet=options.quiet) as progress:
            comparison = compare_depths(plan, progress, _timeline_keeper(options.timelines))
        show(comparison)
        if options.json_file is not None:
            write_report(options.json_file, comparison_report(comparison, device))
        if options.picture is not None:
            draw_comparison(comparison, options.picture)
        comparison.check_tokens()


def _checked_plan(options: BenchOptions, workloads: Callable[["ModelFacts"], Iterable["Workload"]]) -> "Plan":
    """What is to be run, checked before a weight is read."""
    from gapless.bench.model_facts import read_model_facts
    from gapless.bench.picture import check_picture_path
    from gapless.bench.plan import make_plan
    from gapless.bench.report import check_writable

    if options.json_file is not None:
        check_writable(options.json_file, "--json")
    if options.picture is not None:
        check_picture_path(options.picture)
        check_writable(options.picture, "--picture")
    if options.timelines is not None:
        _check_folder(options.timelines)
    engine = {**checked_engine(options.engine)}
    facts = read_model_facts(options.model, engine["load_format"])
    return make_plan(
        model=options.model,
        context=facts.context,
        workloads=list(workloads(facts)),
        depths=options.depth,
        repeats=options.repeats,
        seed=options.seed,
        max_rows=options.max_rows,
        max_model_len=options.max_model_len,
        engine=engine,
    )


def _check_folder(folder: Path) -> None:
    """Refuse a folder for timelines that nothing can be written to; make one that is not there yet."""
    from gapless.timeline.saving import check_target

    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--timelines {folder} cannot be made: {error.strerror}; name another folder") from error
    check_target(folder / "depth1.png")


def _timeline_keeper(folder: Path | None) -> Callable[["RunFigures", "Recording"], None]:
    """What draws each run's timeline; a later round's takes the place of an earlier one's."""
    from gapless.timeline.saving import save

    def keep(run: "RunFigures", recording: "Recording") -> None:
        if folder is not None:
            name = re.sub(r"[^A-Za-z0-9]+", "-", run.workload)
            save(recording, folder / f"{name}_depth{run.depth}.png")

    return keep


def _print_depths(comparison: "Comparison") -> None:
    from gapless.bench.tables import depth_table

    console = _console()
    for workload in comparison.plan.workloads:
        console.print(depth_table(comparison, workload))
    _print_verdicts(comparison)


def _print_latency(comparison: "Comparison") -> None:
    from gapless.bench.tables import latency_table

    _console().print(latency_table(comparison, comparison.plan.workloads))
    _print_verdicts(comparison)


def _print_verdicts(comparison: "Comparison") -> None:
    from gapless.bench.verdict import tokens_verdict, verdict

    several = len(comparison.plan.workloads) > 1
    for workload in comparison.plan.workloads:
        if several:
            print(f"{workload.name}:")
        for line in verdict(comparison, workload).lines:
            print(line)
    print(tokens_verdict(comparison))


def _console() -> Any:
    """Standard output; a pipe has no width of its own, and a narrow table would be cut."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)


bench.command(cls=ManyValues)(serve)
