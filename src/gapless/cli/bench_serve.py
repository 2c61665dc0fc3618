"""``gapless bench serve``: load on a server that speaks OpenAI's HTTP API, gapless's or another.

Results go to standard output, progress to standard error. Wrong options are refused before anything is sent, and a
server that cannot be reached, or answers the warm-up with an error, before anything is measured.
"""

import asyncio
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapless.cli.bench_serve_options import (
    ApiKeyOption,
    ConcurrencyOption,
    EndpointOption,
    InputOption,
    ItlTargetOption,
    JsonOption,
    NewTokensOption,
    PictureOption,
    PromptTokensOption,
    RateOption,
    RequestsOption,
    SeedOption,
    ServedModelOption,
    StopAtEosOption,
    TimeoutOption,
    TtftTargetOption,
    UrlOption,
    WarmUpOption,
)
from gapless.cli.console import UsageError, reported
from gapless.cli.options import QuietOption, VerboseOption
from gapless.errors import GaplessError

if TYPE_CHECKING:
    from gapless.bench.serving.benchmark import ServingRun, Stage
    from gapless.bench.serving.figures import LatencyTargets
    from gapless.bench.serving.options import ServingOptions
    from gapless.bench.serving.sending import RequestRecord

__all__ = ["serve"]

_log = logging.getLogger("gapless.bench")
_PIPE_COLUMNS = 180


class NothingCompletedError(GaplessError):
    """Not one request was answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Results:
    """Where results go beside the terminal, and the targets for goodput."""

    json_file: Path | None
    picture: Path | None
    ttft_slo_ms: float | None
    itl_slo_ms: float | None

    def checked_targets(self) -> "LatencyTargets":
        """The targets; refuses files that could not be written in the end."""
        from gapless.bench.picture import check_picture_path
        from gapless.bench.report import check_writable
        from gapless.bench.serving.figures import LatencyTargets

        if self.json_file is not None:
            check_writable(self.json_file, "--json")
        if self.picture is not None:
            check_picture_path(self.picture)
            check_writable(self.picture, "--picture")
        seconds = [None if ms is None else ms / 1e3 for ms in (self.ttft_slo_ms, self.itl_slo_ms)]
        return LatencyTargets(ttft_s=seconds[0], itl_s=seconds[1])


def serve(
    *,
    url: UrlOption = "http://127.0.0.1:8000",
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    endpoint: EndpointOption = "completions",
    model: ServedModelOption = None,
    input_file: InputOption = None,
    requests: RequestsOption = None,
    prompt_tokens: PromptTokensOption = 256,
    new_tokens: NewTokensOption = 128,
    stop_at_eos: StopAtEosOption = False,
    ttft_slo: TtftTargetOption = None,
    itl_slo: ItlTargetOption = None,
    warm_up: WarmUpOption = 2,
    timeout: TimeoutOption = 600.0,
    api_key: ApiKeyOption = None,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
    picture: PictureOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Load a server over HTTP: throughput, latencies and goodput, at rates or numbers of requests at once."""
    results = _Results(json_file=json_file, picture=picture, ttft_slo_ms=ttft_slo, itl_slo_ms=itl_slo)
    with reported(verbose=verbose, quiet=quiet):
        # Not above: `gapless --help` should not have to wait for what they import.
        from gapless.bench.serving.options import ServingOptions

        try:
            targets = results.checked_targets()
            options = ServingOptions(
                url=url,
                rates=tuple(rate or ()),
                concurrencies=tuple(concurrency or ()),
                endpoint=endpoint,
                model=model,
                input_file=input_file,
                requests=requests,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                ignore_eos=not stop_at_eos,
                warm_up=warm_up,
                timeout_s=timeout,
                seed=seed,
            )
            options.check_input()
        except (GaplessError, OSError) as error:
            raise UsageError(str(error)) from error
        _tell(options, _run(options, api_key, quiet=quiet), targets, results)


def _run(options: "ServingOptions", api_key: str | None, *, quiet: bool) -> "ServingRun":
    """Run every level under a bar, with a line of the log for each."""
    from gapless.bench.progress import BenchProgress
    from gapless.bench.serving.benchmark import run_benchmark

    with BenchProgress(quiet=quiet) as progress:
        expected, done = 1, 0

        def begin(stage: "Stage") -> None:
            nonlocal expected, done
            _log.info("%s: %d requests", stage.name, stage.requests)
            progress.stage(stage.name)
            expected, done = stage.requests, 0

        def count(record: "RequestRecord") -> None:
            nonlocal done
            done += 1
            if progress.share_callback is not None:
                progress.share_callback(done / expected)

        return asyncio.run(run_benchmark(options, api_key=api_key, on_stage=begin, on_done=count))


def _tell(options: "ServingOptions", run: "ServingRun", targets: "LatencyTargets", results: _Results) -> None:
    """Print the table and write the files. That every request failed is an error, told when all the rest is."""
    from rich.console import Console

    from gapless.bench.report import write_report
    from gapless.bench.serving.figures import level_figures
    from gapless.bench.serving.picture import draw_levels
    from gapless.bench.serving.report import serving_report
    from gapless.bench.serving.table import remarks, serving_table

    figures = [level_figures(level, targets) for level in run.levels]
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(serving_table(figures))
    for line in remarks(figures):
        print(line)
    if results.json_file is not None:
        write_report(results.json_file, serving_report(options, run, figures, targets))
    if results.picture is not None:
        draw_levels(figures, targets, f"{run.model} at {options.origin}", results.picture)
    if not any(level.completed for level in figures):
        raise NothingCompletedError(f"no request was answered: {figures[0].first_failure}")
