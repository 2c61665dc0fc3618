"""What every engine of this folder is asked to do, how its decode rate is read, and the JSON line that it prints.

The work: a number of requests with random prompts of one length, no prefix in common, greedy, EOS ignored, on random
weights of a published shape (speed does not depend on their values). The line holds the seconds from the first submit
to the last result, and the milliseconds of a decode step: the median over stretches of ``STRETCH`` steps, all of them
from the time in which every request is decoding, so prefill and tail are no part of it.

``--mean-context`` measures that step where a whole run would take too long: it makes prompts so long that the given
number of new tokens has this mean context. Imports nothing but the standard library.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = [
    "NOT_INSTALLED",
    "STRETCH",
    "WARM_UP_TOKENS",
    "Mark",
    "Workload",
    "add_workload_arguments",
    "heartbeat",
    "median_step_ms",
    "note",
    "print_result",
    "versions",
]

NOT_INSTALLED = 3
"""Exit code of a script whose engine is not installed."""

STRETCH = 100
"""Steps over which one sample of a step's time is taken."""

WARM_UP_TOKENS = 16
"""New tokens of the untimed run with the same prompts, which compiles kernels and captures graphs."""

_HEARTBEAT_S = 10.0
_FIRST_ID, _LAST_ID = 3, 255  # ids that every vocabulary has and that no model of ours gives a meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The same for every engine.

    Attributes:
        preset: a shape of :mod:`gapless.model.checkpoint.presets`.
        requests: all submitted at once.
        prompt: tokens of each prompt.
        new_tokens: tokens that each request generates.
        device: ``cuda`` or ``cpu``.
        dtype: of weights and KV cache, by torch's name.
        seed: of the prompts.
    """

    preset: str
    requests: int
    prompt: int
    new_tokens: int
    device: str
    dtype: str
    seed: int

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Workload":
        """Read what :func:`add_workload_arguments` added; ends the process where the numbers cannot be."""
        prompt = args.prompt
        if args.mean_context is not None:
            prompt = args.mean_context - args.new_tokens // 2
        if min(args.requests, prompt, args.new_tokens) < 1:
            raise SystemExit(
                f"requests={args.requests}, prompt={prompt} and new-tokens={args.new_tokens} must be at least 1 "
                "(with --mean-context, the prompt is that less half of the new tokens)"
            )
        return cls(
            preset=args.preset,
            requests=args.requests,
            prompt=prompt,
            new_tokens=args.new_tokens,
            device=args.device,
            dtype=args.dtype or ("bfloat16" if args.device == "cuda" else "float32"),
            seed=args.seed,
        )

    @property
    def context(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt + self.new_tokens

    @property
    def tokens(self) -> int:
        """Tokens that are generated in all."""
        return self.requests * self.new_tokens

    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt."""
        draw = random.Random(self.seed)
        return [[draw.randint(_FIRST_ID, _LAST_ID) for _ in range(self.prompt)] for _ in range(self.requests)]


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of :class:`Workload`, the same in every script."""
    parser.add_argument("--preset", default="llama-3.1-8b", help="shape of the random weights")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--mean-context", type=int, help="choose --prompt so that decode has this mean context")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bf16, on a CPU fp32")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How far a run had come: decode steps (any fixed origin) at a moment of ``time.perf_counter()``, in seconds."""

    time_s: float
    steps: float


def median_step_ms(marks: Sequence[Mark], *, begin_s: float, end_s: float) -> float | None:
    """Milliseconds of a decode step between two moments.

    Args:
        marks: in order of time.
        begin_s: when every request had its first token.
        end_s: when the first request ended.

    Returns:
        The median over stretches of at least ``STRETCH`` steps, over the whole of it where it is shorter, or ``None``
        if there was no such time: some request ended before another began.
    """
    inside = [mark for mark in marks if begin_s <= mark.time_s <= end_s]
    if len(inside) < 2 or inside[-1].steps <= inside[0].steps:
        return None
    samples: list[float] = []
    start = inside[0]
    for mark in inside[1:]:
        if mark.steps - start.steps >= STRETCH:
            samples.append(_step_ms(start, mark))
            start = mark
    return statistics.median(samples) if samples else _step_ms(inside[0], inside[-1])


def _step_ms(first: Mark, last: Mark) -> float:
    return (last.time_s - first.time_s) / (last.steps - first.steps) * 1e3


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def print_result(
    engine: str,
    workload: Workload,
    *,
    seconds: float,
    tokens: int,
    step_ms: float | None,
    versions: dict[str, str],
    settings: dict[str, Any],
) -> None:
    """Print the JSON line on standard output."""
    assert tokens == workload.tokens, f"{tokens} tokens came back, {workload.tokens} were asked for"
    result = {
        "engine": engine,
        "settings": settings,
        "workload": asdict(workload),
        "seconds": round(seconds, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "ms_per_step": None if step_ms is None else round(step_ms, 4),
        "versions": versions,
    }
    print(json.dumps(result), flush=True)


def note(text: str) -> None:
    """Progress, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')} {os.path.basename(sys.argv[0])}] {text}", file=sys.stderr, flush=True)


@contextmanager
def heartbeat(stage: str) -> Iterator[None]:
    """Say when a stage begins, every ten seconds that it goes on, and how long it took."""
    note(stage)
    start, done = time.perf_counter(), threading.Event()

    def beat() -> None:
        while not done.wait(_HEARTBEAT_S):
            note(f"{stage}: {time.perf_counter() - start:.0f} s so far")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    note(f"{stage}: done in {time.perf_counter() - start:.1f} s")
