"""Sampling defaults: those of a model's ``generation_config.json``, and those that a user puts in their place.

A request's own values come first, then what the ``LLM`` was given, then the file, then the defaults of
:class:`~gapless.SamplingParams`. Pure functions, called once when a model is loaded.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from gapless.errors import CheckpointError, ConfigError, RequestError
from gapless.sampling_params import SamplingParams

__all__ = ["GenerationConfigMode", "file_defaults", "override_defaults"]

GenerationConfigMode = Literal["auto", "none"]
"""``auto`` takes the defaults that the checkpoint's ``generation_config.json`` has, ``none`` leaves them out."""

# The file's names, and ours.
_FIELDS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def file_defaults(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's file says, as fields of :class:`~gapless.SamplingParams` by name.

    ``do_sample`` set to false means greedy, whatever ``temperature`` stands beside it, unless the user turns sampling
    on; what else the file has counts for requests that choose a temperature.

    Args:
        config: the content of a ``generation_config.json``; what is null or has nothing to do with sampling is skipped.
        overrides: what the user gave, which wins.

    Raises:
        CheckpointError: a value is impossible.
    """
    if overrides.get("do_sample") is True or overrides.get("temperature") is not None:
        config = {name: value for name, value in config.items() if name != "do_sample"}
    defaults = _fields(config)
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise CheckpointError(
            f"generation_config.json: {error}; correct it, or leave it out with generation_config='none'"
        ) from error
    return defaults


def override_defaults(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave instead, as fields of :class:`~gapless.SamplingParams` by name.

    Args:
        overrides: by the names of ``generation_config.json``.

    Raises:
        ConfigError: a name is unknown or a value impossible.
    """
    unknown = sorted(overrides.keys() - _FIELDS.keys() - {"do_sample"})
    if unknown:
        known = ", ".join([*_FIELDS, "do_sample"])
        raise ConfigError(f"override_generation_config has the unknown key {unknown[0]!r}; the keys are {known}")
    if not isinstance(overrides.get("do_sample"), bool | None):
        raise ConfigError(f"override_generation_config: do_sample={overrides['do_sample']!r} must be true or false")
    defaults = _fields(overrides)
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from error
    return defaults


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    fields = {ours: config[theirs] for theirs, ours in _FIELDS.items() if config.get(theirs) is not None}
    if config.get("do_sample") is False:
        fields["temperature"] = 0.0
    return fields
