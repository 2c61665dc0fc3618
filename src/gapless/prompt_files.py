"""Prompts in JSONL files: :func:`parse_jsonl`, for everything that takes prompts by the file.

A line is an object with ``prompt``, ``messages`` or ``prompt_token_ids``, optionally an ``id`` that comes back with the
answer, and any field of :class:`~gapless.SamplingParams`, which overrides the caller's for this line. Pure functions,
called before any model is loaded.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from gapless.errors import GaplessError, RequestError
from gapless.sampling_params import SamplingParams

__all__ = ["InputError", "Job", "parse_jsonl"]

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


def parse_jsonl(lines: Iterable[str], name: str, params: SamplingParams) -> list[Job]:
    """Parse the lines of a JSONL file; blank ones are skipped.

    Args:
        lines: the file.
        name: what the file is called in messages.
        params: for lines that do not say otherwise.

    Raises:
        InputError: a line that is no prompt, or text that is not UTF-8.
    """
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
