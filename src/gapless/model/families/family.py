"""What distinguishes one model family from the next: :class:`Family` and the :class:`FamilyTraits` it reads.

All families here are the same decoder (RMSNorm, RoPE, grouped-query attention, SwiGLU) with the same parameter names;
they differ in biases, QK-norm and which layers have a sliding window. A family reads those from a config and refuses,
by name, what would otherwise be ignored without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gapless.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Family", "FamilyTraits", "check_window", "full_attention", "refuse_options", "windows_by_layer_type"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyTraits:
    """A family's choices for one checkpoint.

    Attributes:
        qkv_bias: biases on the query, key and value projections.
        o_bias: a bias on the attention's output projection.
        mlp_bias: biases on the three feed-forward projections.
        qk_norm: RMSNorm over each head of q and k, before RoPE.
        windows: for each layer how many keys a token sees, itself included; ``None`` is all.
    """

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A supported architecture.

    Attributes:
        architecture: its name in a config's ``architectures``.
        model_type: its name in a config's ``model_type``.
        traits: reads a config; raises :class:`UnsupportedModelError` for what it cannot do.
    """

    architecture: str
    model_type: str
    traits: "Callable[[PretrainedConfig], FamilyTraits]"


def full_attention(config: "PretrainedConfig") -> tuple[None, ...]:
    """Windows of a family that has none; refuses a config that declares other layers."""
    for kind in getattr(config, "layer_types", None) or ():
        if kind != "full_attention":
            raise UnsupportedModelError(
                f"layer_types has {kind!r}, which {config.model_type} models do not have; use 'full_attention'"
            )
    return (None,) * int(config.num_hidden_layers)


def windows_by_layer_type(config: "PretrainedConfig") -> tuple[int | None, ...]:
    """Windows of a family whose ``layer_types`` names each layer ``full_attention`` or ``sliding_attention``."""
    kinds = config.layer_types
    if len(kinds) != config.num_hidden_layers:
        raise UnsupportedModelError(
            f"layer_types names {len(kinds)} layers, not num_hidden_layers={config.num_hidden_layers}; make them agree"
        )
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    for kind in kinds:
        if kind not in windows:
            raise UnsupportedModelError(f"layer_types has {kind!r}; supported: {', '.join(windows)}")
    if "sliding_attention" in kinds:
        check_window(config.sliding_window)
    return tuple(windows[kind] for kind in kinds)


def check_window(window: object) -> None:
    """Raise :class:`UnsupportedModelError` unless ``window`` is a positive number of keys."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise UnsupportedModelError(
            f"sliding_window={window!r} for layers with sliding attention; it must be at least 1 "
            "(or turn sliding attention off)"
        )


def refuse_options(config: "PretrainedConfig", *names: str) -> None:
    """Raise :class:`UnsupportedModelError` if an option is on that the family's reference does not have."""
    for name in names:
        value = getattr(config, name, None)
        if value:
            raise UnsupportedModelError(f"{name}={value!r} is not supported for {config.model_type} models")
