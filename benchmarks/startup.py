"""Time to the first token of a process: the real command is started, and each line it tells is stamped as it comes.

A stage lasts from the line that announces it (``read weights ...``) to the next one, so it holds all that happened
meanwhile; the first stage is the interpreter and the command line itself. The clock is the parent's, and starts right
before the process does. The first token is there when the command prints its closing line.

``--cold`` starts with an empty folder for Triton's cache, whose kernels the other runs then find there. Without it the
user's own cache is used, and the first run, which may compile, is shown like the others. The page cache is as it is: on
a machine that has just been started, the first run reads the libraries from disk as well.

    python benchmarks/startup.py --model llama-3.1-8b --load-format dummy --cold --out startup.json
    python benchmarks/startup.py --model smollm2 --device cpu
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_COMMAND = "from gapless.cli.main import main; main()"
_STAGE = re.compile(r"(?P<name>.*) \.\.\.")
_FIRST_TOKEN = re.compile(r"1 request, 1 token\b.*")


def start(options: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Start one process, and return when it told what, in seconds from its start."""
    command = [sys.executable, "-c", _COMMAND, "generate", "hi", "--raw", "--max-tokens", "1", *options]
    began_s = time.perf_counter()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append((time.perf_counter() - began_s, line.decode().strip()))
    ended_s = time.perf_counter() - began_s
    first_token_s = next((at_s for at_s, line in lines if _FIRST_TOKEN.fullmatch(line)), None)
    if process.returncode or first_token_s is None:
        raise SystemExit("\n".join(line for _, line in lines) + f"\nthe command failed ({process.returncode})")
    return {
        "first_token_s": round(first_token_s, 3),
        "exit_s": round(ended_s, 3),
        "stages": stages_of(lines, first_token_s),
        "lines": [{"at_s": round(at_s, 3), "line": line} for at_s, line in lines],
    }


def stages_of(lines: list[tuple[float, str]], first_token_s: float) -> list[dict[str, Any]]:
    """What lay between two announcements; the line that the model is ready ends the last stage of loading."""
    marks = [(0.0, "interpreter and command line")]
    for at_s, line in lines:
        if (match := _STAGE.fullmatch(line)) is not None:
            marks.append((at_s, match["name"]))
        elif " is ready after " in line:
            marks.append((at_s, "first request"))
    ends_s = [at_s for at_s, _ in marks[1:]] + [first_token_s]
    return [
        {"name": name, "start_s": round(at_s, 3), "seconds": round(end_s - at_s, 3)}
        for (at_s, name), end_s in zip(marks, ends_s, strict=True)
    ]


def show(name: str, run: dict[str, Any]) -> None:
    """Print one process."""
    print(f"{name}: {run['first_token_s']:.2f} s to the first token, {run['exit_s']:.2f} s to the end")
    for stage in run["stages"]:
        print(f"  {stage['seconds']:7.3f} s  {stage['name']}")
    sys.stdout.flush()


def environment_of(device: str) -> dict[str, str]:
    """Where this ran; after the runs, since it imports torch and opens the device."""
    import torch
    from gpu_overlap import environment

    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return environment("cuda" if on_cuda else "cpu")


def main() -> None:
    """Start the processes and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--repeat", type=int, default=3, help="processes, besides the cold one")
    parser.add_argument("--cold", action="store_true", help="start the first process with an empty Triton cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="further options of gapless generate, after --")
    args = parser.parse_args()
    options = ["--model", args.model, "--load-format", args.load_format, "--device", args.device, *args.options]
    runs = []
    with tempfile.TemporaryDirectory() as cache:
        variables = os.environ | ({"TRITON_CACHE_DIR": cache} if args.cold else {})
        names = (["cold"] if args.cold else []) + [f"run {number}" for number in range(1, args.repeat + 1)]
        for name in names:
            runs.append({"name": name, **start(options, variables)})
            show(name, runs[-1])
    if args.out:
        result = {"environment": environment_of(args.device), "options": options, "runs": runs}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
