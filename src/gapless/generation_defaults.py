"""Sampling defaults that a model brings along: :func:`sampling_defaults` reads them out of ``generation_config.json``.

A request's own values come first, then what the ``LLM`` was given, then the file, then the defaults of
:class:`~gapless.SamplingParams`. Pure functions, called once when a model is loaded.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

from gapless.errors import CheckpointError, ConfigError, RequestError
from gapless.sampling_params import SamplingParams

__all__ = ["GenerationConfigMode", "sampling_defaults"]

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


def sampling_defaults(config: Mapping[str, Any], *, override: bool = False) -> dict[str, float]:
    """Return fields of :class:`~gapless.SamplingParams` by name.

    ``do_sample`` set to false means greedy, whatever ``temperature`` stands beside it; what else the file has counts
    for requests that choose a temperature.

    Args:
        config: the content of a ``generation_config.json``; what is null or has nothing to do with sampling is skipped.
        override: it was given by the user: names that are not known are refused.

    Raises:
        CheckpointError: a value of the file is impossible.
        ConfigError: a value or a name given by the user is.
    """
    unknown = sorted(config.keys() - _FIELDS.keys() - {"do_sample"}) if override else []
    if unknown:
        known = ", ".join([*_FIELDS, "do_sample"])
        raise ConfigError(f"override_generation_config has the unknown key {unknown[0]!r}; the keys are {known}")
    defaults = {ours: config[theirs] for theirs, ours in _FIELDS.items() if config.get(theirs) is not None}
    if config.get("do_sample") is False:
        defaults["temperature"] = 0.0
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        if override:
            raise ConfigError(f"override_generation_config: {error}") from error
        raise CheckpointError(
            f"generation_config.json: {error}; correct it, or leave it out with generation_config='none'"
        ) from error
    return defaults
