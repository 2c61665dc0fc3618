"""What ``gapless generate`` is asked to do: :func:`read_jobs` collects prompts before any model is loaded.

Prompts come from the command line, from a JSONL file (:mod:`gapless.prompt_files` has its format), or from standard
input with one prompt a line.
"""

import sys
from collections.abc import Sequence

from gapless.cli.console import UsageError
from gapless.prompt_files import InputError, Job, parse_jsonl
from gapless.sampling_params import SamplingParams

__all__ = ["InputError", "Job", "read_jobs"]


def read_jobs(prompts: Sequence[str], input_file: str | None, params: SamplingParams) -> list[Job]:
    """Read all prompts.

    Args:
        prompts: from the command line.
        input_file: a JSONL file, ``-`` for JSONL on standard input; ``None`` for none.
        params: for prompts that do not say otherwise.

    Raises:
        UsageError: two sources of prompts, or none.
        InputError: a line that is no prompt.
        OSError: the file cannot be read.
    """
    if prompts and input_file is not None:
        raise UsageError("prompts were given and --input too: use one of them")
    if prompts:
        return [
            Job(place=f"prompt {number}", source="prompt", value=prompt, params=params)
            for number, prompt in enumerate(prompts, 1)
        ]
    if input_file == "-":
        return parse_jsonl(sys.stdin, "standard input", params)
    if input_file is not None:
        with open(input_file, encoding="utf-8") as lines:
            return parse_jsonl(lines, input_file, params)
    if sys.stdin.isatty():
        raise UsageError('there is no prompt: give one ("..."), a file (--input prompts.jsonl) or standard input')
    return [
        Job(place=f"standard input:{number}", source="prompt", value=line.rstrip("\n"), params=params)
        for number, line in enumerate(sys.stdin, 1)
        if line.strip()
    ]
