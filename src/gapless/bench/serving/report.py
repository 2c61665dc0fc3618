"""A serving benchmark as JSON: :func:`serving_report`, the figures of each level and the raw times behind them."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import gapless
from gapless.bench.serving.benchmark import ServingRun
from gapless.bench.serving.figures import LatencyTargets, LevelFigures
from gapless.bench.serving.load import LevelRun
from gapless.bench.serving.options import ServingOptions

__all__ = ["serving_report"]

_KEY_FLAG = "--api-key"


def serving_report(
    options: ServingOptions, run: ServingRun, figures: Sequence[LevelFigures], targets: LatencyTargets
) -> dict[str, Any]:
    """Everything about a benchmark, ready to be written.

    Args:
        options: what was asked for.
        run: the records of each level.
        figures: what was made of each.
        targets: for goodput.
    """
    return {
        "environment": {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": _command(sys.argv),
            "gapless": gapless.__version__,
            "python": platform.python_version(),
            "client": f"{platform.platform()}, {os.cpu_count()} cores",
        },
        "model": run.model,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
        "targets": asdict(targets),
        "levels": [asdict(level) | {"records": _records(run)} for level, run in zip(figures, run.levels, strict=True)],
    }


def _command(arguments: Sequence[str]) -> str:
    """The command line, but for the server's key: reports are kept and shown around."""
    words = [Path(arguments[0]).name, *arguments[1:]]
    for place, word in enumerate(words):
        if word.startswith(f"{_KEY_FLAG}="):
            words[place] = f"{_KEY_FLAG}=..."
        elif place and words[place - 1] == _KEY_FLAG:
            words[place] = "..."
    return " ".join(words)


def _records(run: LevelRun) -> list[dict[str, Any]]:
    """Each request, with times in seconds from the level's first one."""
    start_s = min(record.scheduled_s for record in run.records)
    return [
        {
            "due_s": record.scheduled_s - start_s,
            "sent_s": record.sent_s - start_s,
            "ended_s": record.ended_s - start_s,
            "ttft_s": record.ttft_s,
            "tpot_s": record.tpot_s,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "failure": record.failure,
        }
        for record in run.records
    ]
