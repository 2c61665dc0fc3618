"""``python -m simulation --seeds N [--start S] [--jobs J]``: run seeds, print progress, and how to replay a failure.

Exit code 0: all seeds are right. ``FAILED_SEED`` (3): one was not, and its number is printed; it is never run again.
Any other code: the simulation itself could not run.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from simulation.harness import RunSummary, SimulationError, run

FAILED_SEED = 3
_CHUNK = 50


def run_seeds(start: int, count: int) -> list[RunSummary] | str:
    """Run ``count`` seeds from ``start``; the message of the first failure instead, if there is one."""
    torch.set_num_threads(1)
    # After a failure the engine is closed in whatever state it is; what it says about that is of no interest.
    logging.getLogger("gapless").setLevel(logging.CRITICAL)
    summaries: list[RunSummary] = []
    for seed in range(start, start + count):
        try:
            summaries.append(run(seed))
        except SimulationError as failure:
            return str(failure)
    return summaries


def _chunks(start: int, count: int, jobs: int) -> Iterator[list[RunSummary] | str]:
    starts = range(start, start + count, _CHUNK)
    counts = [min(_CHUNK, start + count - first) for first in starts]
    if jobs == 1:
        yield from map(run_seeds, starts, counts)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_seeds, starts, counts)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    began_s = time.perf_counter()
    done: list[RunSummary] = []
    columns = TextColumn("seeds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=options.seeds)
        for chunk in _chunks(options.start, options.seeds, options.jobs):
            if isinstance(chunk, str):
                progress.stop()
                console.print(f"FAILED {chunk}", style="red", markup=False, highlight=False)
                return FAILED_SEED
            done += chunk
            progress.update(task, advance=len(chunk))
    seconds = time.perf_counter() - began_s
    console.print(
        f"{len(done)} seeds are right ({len(done) / seconds:.0f} a second): {sum(s.steps for s in done)} steps, "
        f"{sum(s.preemptions for s in done)} preemptions, {sum(s.cached_tokens for s in done)} cached tokens, "
        f"{sum(s.stopped for s in done)} stops, {sum(s.aborted for s in done)} aborts, "
        f"{sum(s.failed for s in done)} unhealthy, {sum(s.dropped_rows for s in done)} rows dropped"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
