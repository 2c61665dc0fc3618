"""What ``gapless generate`` is asked to do: :func:`read_jobs` collects prompts before any model is loaded.

Prompts come from the command line, from a JSONL file, or from standard input with one prompt a line. A line of a JSONL
file is an object with ``prompt``, ``messages`` or ``prompt_token_ids``, optionally an ``id`` that comes back with the
answer, and any field of :class:`~gapless.SamplingParams`, which overrides the command's option for this line.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from gapless.cli.console import UsageError
from gapless.errors import GaplessError, RequestError
from gapless.sampling_params import SamplingParams

__all__ = ["InputError", "Job", "read_jobs"]

Source = Literal["prompt", "messages", "prompt_token_ids"]
_SOURCES: tuple[Source, ...] = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_FIELDS = frozenset(f.name for f in fields(SamplingParams))


class InputError(GaplessError):
    """A line of the input cannot be used; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prompt.

    Attributes:
        place: where it was read, for messages.
        source: which form it has.
        value: the prompt in that form.
        params: how to sample.
        extra: what is passed on to the answer.
    """

    place: str
    source: Source
    value: Any
    params: SamplingParams
    extra: dict[str, Any] = field(default_factory=dict)


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
        return _read_jsonl(sys.stdin, "standard input", params)
    if input_file is not None:
        with open(input_file, encoding="utf-8") as lines:
            return _read_jsonl(lines, input_file, params)
    if sys.stdin.isatty():
        raise UsageError('there is no prompt: give one ("..."), a file (--input prompts.jsonl) or standard input')
    return [
        Job(place=f"standard input:{number}", source="prompt", value=line.rstrip("\n"), params=params)
        for number, line in enumerate(sys.stdin, 1)
        if line.strip()
    ]


def _read_jsonl(lines: Iterable[str], name: str, params: SamplingParams) -> list[Job]:
    try:
        return [_parse(line, f"{name}:{number}", params) for number, line in enumerate(lines, 1) if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text: {error}") from error


def _parse(line: str, place: str, params: SamplingParams) -> Job:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f'{place} is not JSON ({error}); write {{"prompt": "..."}}, or pipe plain lines to standard input'
        ) from error
    if not isinstance(entry, dict):
        raise InputError(f'{place} must be an object such as {{"prompt": "..."}}, not {type(entry).__name__}')
    given = {key: value for key, value in entry.items() if value is not None}
    sources = [source for source in _SOURCES if source in given]
    if len(sources) != 1:
        raise InputError(f"{place} has {len(sources)} of {', '.join(_SOURCES)}; give exactly one")
    overrides = {key: value for key, value in given.items() if key in _SAMPLING_FIELDS}
    unknown = sorted(given.keys() - overrides.keys() - {"id", *_SOURCES})
    if unknown:
        raise InputError(
            f"{place} has the unknown key {unknown[0]!r}; keys are id, {', '.join(_SOURCES)} and the sampling options"
        )
    try:
        own_params = replace(params, **overrides)
    except RequestError as error:
        raise InputError(f"{place}: {error}") from error
    extra = {"id": given["id"]} if "id" in given else {}
    return Job(place=place, source=sources[0], value=given[sources[0]], params=own_params, extra=extra)
