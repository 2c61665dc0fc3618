"""A benchmark as a file: :func:`write_report`, with everything needed to judge or repeat it.

Raw figures of every run are in it, not only what was made of them. A file is written whole or not at all, and whether
it can be written is checked before anything is measured: :func:`check_writable`.
"""

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import gapless
from gapless.bench.comparison import Comparison
from gapless.bench.figures import RunFigures
from gapless.bench.growth import Growth
from gapless.bench.summary import summaries
from gapless.bench.verdict import tokens_verdict, verdict
from gapless.config import EngineConfig
from gapless.errors import ConfigError
from gapless.whole_files import write_whole

__all__ = ["check_writable", "comparison_report", "environment", "growth_report", "write_report"]

_PACKAGES = ("torch", "triton", "transformers", "numpy")
# Of a list with nothing but numbers in it: one line, not one a number.
_NUMBERS = re.compile(r"\[\s+((?:-?[\d.e+-]+,\s+)*-?[\d.e+-]+)\s+\]")
_SECONDS_DIGITS = 7


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written in the end.

    Raises:
        ConfigError: naming option and path.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    # A file is made beside it and takes its place; a picture, or what is no file, is written to itself.
    places = ([path] if path.exists() else []) + ([path.parent] if path.is_file() or not path.exists() else [])
    if not all(os.access(place, os.W_OK) for place in places):
        raise ConfigError(f"{option} {path} may not be written: choose another place")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, hardware, command, date, and the commit (``-dirty``: changed since) of a git checkout."""
    found: dict[str, Any] = {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": " ".join(["gapless" if sys.argv[0] == "-c" else Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": _commit(),
        "gapless": gapless.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: number for name in _PACKAGES if (number := _version_of(name))},
        "device": device.type,
        "cpu_cores": psutil.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def comparison_report(comparison: Comparison, device: torch.device) -> dict[str, Any]:
    """Everything about a comparison, ready to be written."""
    plan = comparison.plan
    return {
        "environment": environment(device),
        "model": plan.model,
        "config": _config(plan.config),
        "depths": list(plan.depths),
        "order": plan.rounds(),
        "repeats": plan.repeats,
        "read_bytes_per_s": comparison.read_bytes_per_s,
        "tokens": {"same": comparison.difference is None, "verdict": tokens_verdict(comparison)},
        "workloads": [
            {
                "name": workload.name,
                "num_requests": len(workload.requests),
                "prompt_tokens": workload.num_prompt_tokens,
                "least_bytes": comparison.least_bytes[workload.name],
                "floor_s": comparison.floor_s(workload.name),
                "verdict": dataclasses.asdict(verdict(comparison, workload)),
                "depths": [dataclasses.asdict(each) for each in summaries(comparison, workload)],
                "runs": [_run(run) for run in comparison.runs if run.workload == workload.name],
            }
            for workload in plan.workloads
        ],
    }


def growth_report(growth: Growth, device: torch.device) -> dict[str, Any]:
    """Everything about a table of growth, ready to be written."""
    plan = growth.plan
    return {
        "environment": environment(device),
        "model": plan.model,
        "config": _config(plan.config),
        "depth": plan.config.depth,
        "steps": plan.steps,
        "budget_s": plan.budget_s,
        "read_bytes_per_s": growth.read_bytes_per_s,
        "kv_capacity": growth.kv_capacity,
        "host_s": growth.host_s,
        "cells": [dataclasses.asdict(cell) | {"roofline_share": cell.roofline_share} for cell in growth.cells],
    }


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report as JSON, a file whole or not at all; lists of numbers take one line each."""
    text = json.dumps(_rounded(report), indent=1, ensure_ascii=False)
    text = _NUMBERS.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    write_whole(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def _config(config: EngineConfig) -> dict[str, Any]:
    """The engine's options but for the depth, of which a comparison has several, and the timeline, which is on."""
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(config, name) for name in names if name not in ("depth", "timeline")}


def _run(run: RunFigures) -> dict[str, Any]:
    """A run's raw figures; of its tokens only how many, since they are compared and then of no use."""
    found = {field.name: getattr(run, field.name) for field in dataclasses.fields(run) if field.name != "token_ids"}
    requests = run.requests
    names = [field.name for field in dataclasses.fields(requests[0])]
    return found | {
        "steps": dataclasses.asdict(run.steps),
        "requests": {name: [getattr(request, name) for request in requests] for name in names},
    }


def _rounded(value: Any) -> Any:
    """Times to a tenth of a microsecond: more digits say nothing and make files large."""
    match value:
        case float():
            return round(value, _SECONDS_DIGITS)
        case dict():
            return {str(key): _rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case _:
            return value


def _commit() -> str | None:
    folder = Path(gapless.__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
