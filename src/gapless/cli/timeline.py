"""``gapless timeline``: run something, and see where the device's time went.

The summary goes to standard output, and a folder gets the pictures, a trace for ui.perfetto.dev and the numbers.
Anything that cannot work is refused before a model is loaded. What the engine does for the first time (kernels that are
compiled, graphs that are captured) happens in a warm-up, which is not shown.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import gapless
from gapless.cli.console import UsageError, reported, say
from gapless.cli.options import ModelOption, QuietOption, VerboseOption, checked_engine, shared_options
from gapless.cli.start import started
from gapless.errors import CheckpointError, GaplessError

if TYPE_CHECKING:
    from gapless.bench.workloads import Workload
    from gapless.llm import LLM
    from gapless.prompts import PromptMapping
    from gapless.timeline.spans import Recording

__all__ = ["timeline"]

_WARM_UP_TOKENS = 8
_PIPE_COLUMNS = 100
# Requests are run as they were made, with no penalties or filters that the model's files suggest.
_AS_THEY_ARE = {"generation_config": "none"}


# A prompt that is found in the cache is not computed, and nothing of it would be seen.
@shared_options(engine_defaults={"enable_prefix_caching": False}, without_engine=["timeline"])
def timeline(
    *,
    model: ModelOption = "smollm2",
    requests: Annotated[
        int | None, typer.Option("--requests", help="Requests, all at once (8 if unset), or the file's first so many.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of a made-up prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens to generate for each prompt.")] = 64,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", "-i", help="Real prompts: a JSONL file as gapless generate takes it. They end at EOS."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for timeline.png, .svg, .trace.json and .json, and zoom.png.")
    ] = Path("timeline"),
    zoom: Annotated[
        int | None, typer.Option("--zoom", help="First step to show close up; steps that stand for the run if unset.")
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    engine: dict[str, Any],
) -> None:
    """Run a workload with the timeline on: a summary, a picture, a trace and the numbers."""
    with reported(verbose=verbose, quiet=quiet):
        try:
            options = {**checked_engine(engine), "timeline": True}
            workload = _workload(model, options, input_file, requests, prompt_tokens, new_tokens)
            _make_folder(output)
        except CheckpointError:
            raise
        except GaplessError as error:
            raise UsageError(str(error)) from error
        with started(lambda: gapless.LLM, model, options=options, given=_AS_THEY_ARE, quiet=quiet) as llm:
            _run(llm, workload, quiet=quiet)
            recording = llm.timeline.recording()
        _print_summary(recording)
        _write(recording, output, zoom, quiet=quiet)


def _workload(
    model: str, options: Mapping[str, Any], input_file: Path | None, requests: int | None, prompt: int, new: int
) -> "Workload":
    """What to run, made and checked before any weight is read."""
    # Not above: they import torch, for which `gapless --help` should not have to wait.
    from gapless.bench.model_facts import read_model_facts
    from gapless.bench.workloads import Lengths, jsonl_workload, synthetic_workload

    facts = read_model_facts(model, options["load_format"])
    context = min(options["max_model_len"] or facts.context, facts.context)
    if input_file is not None:
        return jsonl_workload(
            input_file,
            facts.load_tokenizer(),
            max_tokens=new,
            max_model_len=context,
            eos_token_ids=facts.eos_token_ids,
            limit=requests,
        )
    workload = synthetic_workload(
        requests=8 if requests is None else requests,
        prompt=Lengths(mean=prompt),
        new=Lengths(mean=new),
        vocab_size=facts.vocab_size,
    )
    workload.check(context)
    return workload


def _make_folder(folder: Path) -> None:
    from gapless.timeline.saving import check_target

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output {folder}: it is a file; give a folder")
    if not folder.parent.is_dir():
        raise UsageError(f"--output {folder}: there is no folder {folder.parent}")
    folder.mkdir(exist_ok=True)
    check_target(folder / "timeline.png")


def _run(llm: "LLM", workload: "Workload", *, quiet: bool) -> None:
    """Warm up, measure what the roofline needs, and run the workload with nothing else in the timeline."""
    workload.check(llm.max_model_len)
    _tell(f"warming up with {_WARM_UP_TOKENS} tokens for each request ...", quiet=quiet)
    _generate(llm, workload.shortened(_WARM_UP_TOKENS), use_tqdm=False)
    try:
        llm.timeline.measure_read_bandwidth()
    except GaplessError as error:
        say(f"the share of the roofline is not shown: {error}", style="yellow")
    llm.timeline.clear()
    _tell(f"running {workload.name} ...", quiet=quiet)
    _generate(llm, workload, use_tqdm=False if quiet else None)


def _generate(llm: "LLM", workload: "Workload", *, use_tqdm: bool | None) -> None:
    prompts: list[PromptMapping] = [{"prompt_token_ids": request.prompt_token_ids} for request in workload.requests]
    params = [
        replace(request.params, ignore_eos=request.params.ignore_eos or workload.ends_by_length)
        for request in workload.requests
    ]
    llm.generate(prompts, params, use_tqdm=use_tqdm)


def _tell(text: str, *, quiet: bool) -> None:
    if not quiet:
        say(text, style="dim")


def _print_summary(recording: "Recording") -> None:
    from rich.console import Console

    from gapless.timeline.summary import summarise
    from gapless.timeline.summary_table import summary_table

    # A pipe has no width of its own, and a narrow table would be cut.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    console.print(summary_table(summarise(recording)))


def _write(recording: "Recording", folder: Path, zoom: int | None, *, quiet: bool) -> None:
    from gapless.timeline.picture import draw_steps, save_picture
    from gapless.timeline.saving import save

    # Pictures last: a step to show that was not recorded costs none of the rest.
    for name in ("timeline.trace.json", "timeline.json", "timeline.png", "timeline.svg"):
        save(recording, folder / name, zoom=zoom)
        _tell(f"wrote {folder / name}", quiet=quiet)
    save_picture(draw_steps(recording, zoom=zoom), folder / "zoom.png", "png")
    _tell(f"wrote {folder / 'zoom.png'}", quiet=quiet)
