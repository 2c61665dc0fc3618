"""One workload through several engines in turn, in one go, with the ratios to gapless.

Each run is a process of its own, so engines cannot disturb each other and each starts with an empty device. The order
is shuffled anew for every repeat: a machine that warms up or gets busy then hits all alike. The table holds medians. An
engine that is missing or fails is listed by name with the last line of its error::

    python benchmarks/peers/compare.py --requests 32 --prompt 256 --new-tokens 8192 --repeats 2 --out peers.json
    python benchmarks/peers/compare.py --mean-context 4352 --new-tokens 512 --engines gapless-depth-2 transformers-async
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import IO, Any

from workload import Workload, add_workload_arguments, note

__all__ = ["ENGINES", "Run", "Summary", "run_engine", "summaries", "table"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

ENGINES: Mapping[str, Sequence[str]] = {
    "gapless-depth-1": ("gapless_offline.py", "--depth", "1"),
    "gapless-depth-2": ("gapless_offline.py", "--depth", "2"),
    "gapless-depth-3": ("gapless_offline.py", "--depth", "3"),
    "transformers-sync": ("transformers_generate_batch.py", "--batching", "sync"),
    "transformers-async": ("transformers_generate_batch.py", "--batching", "async"),
    "transformers-sdpa-sync": ("transformers_generate_batch.py", "--batching", "sync", "--attention", "sdpa"),
    "transformers-sdpa-async": ("transformers_generate_batch.py", "--batching", "async", "--attention", "sdpa"),
    "vllm": ("vllm_offline.py",),
    "vllm-sync": ("vllm_offline.py", "--scheduling", "sync"),
}
"""What ``--engines`` takes: a script of this folder with its options."""

_DEFAULT_ENGINES = ("gapless-depth-1", "gapless-depth-2", "transformers-sync", "transformers-async", "vllm")
_FAILED = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One process.

    Attributes:
        engine: a name of ``ENGINES``.
        command: as it can be typed in the repository's root.
        result: the script's JSON line, or ``None``.
        error: why there is no result, in one line, or ``None``.
    """

    engine: str
    command: str
    result: dict[str, Any] | None
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Medians of one engine's runs; ``None`` where nothing was measured. Ratios say how many times as long it takes."""

    engine: str
    seconds: float | None
    tokens_per_s: float | None
    ms_per_step: float | None
    seconds_ratio: float | None
    step_ratio: float | None
    error: str | None


def workload_options(workload: Workload) -> list[str]:
    """The options that give a script this workload."""
    return [text for name, value in asdict(workload).items() for text in (f"--{name.replace('_', '-')}", str(value))]


def run_engine(engine: str, script: Sequence[str], workload: Workload, timeout_s: float) -> Run:
    """Run a script of this folder to its end, passing on what it says on standard error."""
    arguments = [*script[1:], *workload_options(workload)]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    lines: list[str] = []
    errors: list[str] = []
    code: int | None = None
    with subprocess.Popen(
        [sys.executable, str(HERE / script[0]), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONPATH": path},
        # A group of its own: an engine with processes of its own ends as a whole.
        start_new_session=True,
    ) as process:
        readers = [
            threading.Thread(target=_collect, args=(process.stdout, lines, None)),
            threading.Thread(target=_collect, args=(process.stderr, errors, sys.stderr)),
        ]
        for reader in readers:
            reader.start()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            errors.append(f"took longer than {timeout_s:g} s")
        finally:
            with suppress(ProcessLookupError):  # the whole group may have ended
                os.killpg(process.pid, signal.SIGKILL)
        for reader in readers:
            reader.join()
    command = " ".join(["PYTHONPATH=src", "python", f"benchmarks/peers/{script[0]}", *arguments])
    result = _result_line(lines) if code == 0 else None
    error = None if result else _error_line(code, errors)
    return Run(engine=engine, command=command, result=result, error=error)


def _collect(stream: IO[str], lines: list[str], also: IO[str] | None) -> None:
    for line in stream:
        lines.append(line)
        if also is not None:
            also.write(line)
            also.flush()


def _error_line(code: int | None, errors: Sequence[str]) -> str:
    last = next((line.strip() for line in reversed(errors) if line.strip()), "it said nothing")
    return last if code is None else f"exit code {code}: {last}"


def _result_line(lines: Sequence[str]) -> dict[str, Any] | None:
    """The last line that is a result: engines may print lines of their own."""
    for line in reversed(lines):
        if line.startswith('{"engine"'):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def summaries(runs: Sequence[Run], baseline: str) -> list[Summary]:
    """Medians by engine, in the order in which the engines first ran."""
    engines = list(dict.fromkeys(run.engine for run in runs))
    medians = {
        engine: {
            key: _median([run.result[key] for run in runs if run.engine == engine and run.result])
            for key in ("seconds", "tokens_per_s", "ms_per_step")
        }
        for engine in engines
    }
    base = medians.get(baseline, {})
    return [
        Summary(
            engine=engine,
            **values,
            seconds_ratio=_ratio(values["seconds"], base.get("seconds")),
            step_ratio=_ratio(values["ms_per_step"], base.get("ms_per_step")),
            error=next((run.error for run in runs if run.engine == engine and run.error), None),
        )
        for engine, values in medians.items()
    ]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else round(value / base, 3)


def table(found: Sequence[Summary], baseline: str) -> str:
    """The summaries as text, the fastest first and failures last."""
    lines = [f"{'engine':<26}{'seconds':>10}{'tokens/s':>12}{'ms/step':>10}{'time':>9}{'step':>9}"]
    for each in sorted(found, key=lambda s: (s.seconds is None, s.seconds or 0.0)):
        line = f"{each.engine:<26}"
        if each.seconds is not None:
            line += f"{each.seconds:>10.2f}{_shown(each.tokens_per_s, 12, 1)}{_shown(each.ms_per_step, 10, 3)}"
            line += f"{_shown(each.seconds_ratio, 8, 2)}x{_shown(each.step_ratio, 8, 2)}x"
        lines.append(line + (f"  FAILED: {each.error}" if each.error else ""))
    return "\n".join([*lines, f"time and step: as multiples of {baseline}"])


def _shown(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def environment() -> dict[str, str]:
    """Where this ran."""

    def answer(*command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": answer("git", "rev-parse", "--short", "HEAD") or "unknown",
        "gpu": answer("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "none",
        "cpu": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
    }


def main() -> int:
    """Run every engine ``--repeats`` times; returns 1 if a run of gapless failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(_DEFAULT_ENGINES))
    parser.add_argument(
        "--baseline", choices=list(ENGINES), default="gapless-depth-2", help="what the others are held to"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--order-seed", type=int, default=0, help="of the order of the engines")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one run")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    args = parser.parse_args()
    workload = Workload.from_arguments(args)
    draw, runs = random.Random(args.order_seed), list[Run]()
    start = time.perf_counter()
    for repeat in range(args.repeats):
        for engine in draw.sample(args.engines, len(args.engines)):
            note(f"{engine}, {repeat + 1} of {args.repeats}, {time.perf_counter() - start:.0f} s since the start")
            runs.append(run_engine(engine, ENGINES[engine], workload, args.timeout_s))
            print(json.dumps(runs[-1].result or {"engine": engine, "error": runs[-1].error}), flush=True)
            found = summaries(runs, args.baseline)
            if args.out:  # after each run, so that what has been measured stays if this is cut short
                written = {
                    "environment": environment(),
                    "workload": asdict(workload),
                    "summary": [asdict(each) for each in found],
                    "runs": [asdict(run) for run in runs],
                }
                args.out.write_text(json.dumps(written, indent=1) + "\n")
    print(table(found, args.baseline))
    return _FAILED if any(run.error for run in runs if run.engine.startswith("gapless")) else 0


if __name__ == "__main__":
    raise SystemExit(main())
