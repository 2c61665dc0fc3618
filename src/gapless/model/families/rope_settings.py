"""RoPE settings of a config, in every spelling transformers reads, as a :class:`~gapless.layers.rope.RopeSpec`.

Old configs have ``rope_theta`` at top level and ``rope_scaling`` with ``type`` or ``rope_type``; new ones have
``rope_parameters``. transformers turns both into ``rope_parameters``, and its own functions give the frequencies, so
that a scaling rule is never a second implementation. A rule that is not listed here is refused by name.
"""

import copy
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.layers.rope import RopeSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["rope_from_config"]

SUPPORTED_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_from_config(config: "PretrainedConfig", head_dim: int) -> RopeSpec:
    """Read the RoPE settings.

    Raises:
        UnsupportedModelError: for an unknown scaling rule, partial rotation, or settings that differ between layers.
        CheckpointError: for a rule whose numbers are missing or wrong.
    """
    # transformers' functions fill in missing keys of the config they are given, and some read head_dim unguarded.
    config = copy.deepcopy(config)
    config.head_dim = head_dim
    config.standardize_rope_params()
    settings: Mapping[str, Any] = config.rope_parameters
    kind = settings.get("rope_type", "default")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise UnsupportedModelError(
            f"rope_parameters that differ between layers ({', '.join(settings)}) are not supported"
        )
    if kind not in SUPPORTED_KINDS:
        raise UnsupportedModelError(f"RoPE type {kind!r} is not supported; supported: {', '.join(SUPPORTED_KINDS)}")
    partial = settings.get("partial_rotary_factor")
    if partial is not None and partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor={partial} is not supported; only 1.0 is")
    if head_dim % 2:
        raise UnsupportedModelError(f"head_dim={head_dim} is odd, and RoPE rotates pairs of dimensions")
    try:
        inv_freq, factor = _frequencies(config, kind, head_dim)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"RoPE settings of type {kind!r} are incomplete or wrong: {error}") from error
    if not bool(torch.isfinite(inv_freq).all()) or not math.isfinite(factor):
        raise CheckpointError(f"RoPE settings of type {kind!r} give frequencies that are not finite: {dict(settings)}")
    return RopeSpec(
        kind=kind,
        inv_freq=tuple(inv_freq.tolist()),
        attention_factor=float(factor),
        max_positions=_max_positions(config, kind, settings),
    )


def _frequencies(config: "PretrainedConfig", kind: str, head_dim: int) -> tuple[torch.Tensor, float]:
    if kind != "default":
        # Imported where it is used: see gapless.model.checkpoint.json_files.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return inv_freq, factor
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0


def _max_positions(config: "PretrainedConfig", kind: str, settings: Mapping[str, Any]) -> int:
    """The most positions that the frequencies are made for; the config's own limit is never scaled up by default.

    ``dynamic`` changes its frequencies above ``max_position_embeddings``, so that cached keys would be stale there.
    For the other rules, ``factor`` says how far the original length stretches, which may be more than the config's
    limit where that has not been raised with it; a caller who asks for the longer context by name can have it.
    """
    limit = int(config.max_position_embeddings)
    factor = settings.get("factor") or 1.0
    if kind in ("yarn", "llama3"):
        return max(limit, int(settings["original_max_position_embeddings"] * factor))
    if kind == "linear":
        return max(limit, int(limit * factor))
    return limit
