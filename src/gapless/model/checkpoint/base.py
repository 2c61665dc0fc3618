"""What an opened checkpoint is: a validated description, and weights that can be walked once at a time.

Opening reads configuration and headers only, so it is cheap and finds every fault of the files before memory for the
model is allocated. The objects are immutable and may be shared between threads; one walk over the weights belongs to
the thread that started it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import torch
from torch import Tensor

from gapless.model.spec import ModelSpec, spec_from_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["Checkpoint", "LoadFormat", "NoWeights", "ProgressCallback", "TokenizerSource", "WeightSource"]

LoadFormat = Literal["auto", "dummy"]
"""``auto`` reads the weights that the checkpoint holds; ``dummy`` takes its shapes only."""

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), both counted as stored in the files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSource:
    """Where the text layer finds this checkpoint's tokenizer.

    Attributes:
        kind: a ``folder`` in Hugging Face's layout, the metadata of a ``gguf`` file, or plain ``bytes``: one token
            for each byte and ids 256 to 259 for control tokens, which needs no file.
        path: the folder or file; ``None`` for ``bytes``.
        eos_token_id: the end token where the source is known to name it better than the tokenizer that
            ``transformers`` builds from it (GGUF metadata); ``None`` leaves it to the tokenizer.
    """

    kind: Literal["folder", "gguf", "bytes"]
    path: Path | None
    eos_token_id: int | None = None


class WeightSource(Protocol):
    """Tensors under the parameter names that ``transformers`` uses for the model's causal LM class."""

    @property
    def total_bytes(self) -> int:
        """Size of all tensors as stored."""
        ...

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that :meth:`tensors` yields, in the same order, from the headers alone."""
        ...

    def tensors(self, on_progress: ProgressCallback | None) -> Iterator[tuple[str, Tensor]]:
        """Walk the tensors one at a time; see :meth:`Checkpoint.tensors`."""
        ...


class NoWeights:
    """The weights of a checkpoint that is only a shape: there are none, and the model draws its own."""

    total_bytes = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """No shapes."""
        return {}

    def tensors(self, on_progress: ProgressCallback | None) -> Iterator[tuple[str, Tensor]]:
        """No tensors; ``on_progress`` is never called."""
        return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An opened checkpoint, whose configuration and headers have been read and found sound.

    Attributes:
        spec: the model's shape and options.
        trained_dtype: the dtype that the checkpoint states, if any.
        config: the configuration that ``spec`` was read from; ``None`` for a preset, which is nothing but its shape.
        generation_config: the raw ``generation_config.json``; empty when the checkpoint has none.
        eos_token_ids: every end token that the generation config, the config file or the GGUF metadata names, those
            outside the vocabulary left out. A library default is not among them. May be empty.
        tokenizer_source: where the tokenizer is.
        weights: the tensors.
    """

    spec: ModelSpec
    trained_dtype: torch.dtype | None
    config: "PretrainedConfig | None"
    generation_config: dict[str, Any]
    eos_token_ids: frozenset[int]
    tokenizer_source: TokenizerSource
    weights: WeightSource

    @classmethod
    def from_config(
        cls,
        config: "PretrainedConfig",
        *,
        generation_config: dict[str, Any],
        eos_token_ids: frozenset[int],
        tokenizer_source: TokenizerSource,
        weights: WeightSource,
    ) -> Self:
        """Describe a checkpoint whose files state a configuration.

        Raises:
            UnsupportedModelError: it needs something gapless does not have, by name.
            CheckpointError: the configuration contradicts itself.
        """
        return cls(
            spec=spec_from_config(config),
            trained_dtype=_dtype_of(config),
            config=config,
            generation_config=generation_config,
            eos_token_ids=eos_token_ids,
            tokenizer_source=tokenizer_source,
            weights=weights,
        )

    @property
    def total_bytes(self) -> int:
        """Size of all tensors as stored; 0 for a checkpoint without weights."""
        return self.weights.total_bytes

    def tensor_names(self) -> tuple[str, ...]:
        """Every name that :meth:`tensors` yields, in the same order."""
        return tuple(self.weights.shapes())

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the order of :meth:`tensors`; known without reading any data."""
        return self.weights.shapes()

    def tensors(self, on_progress: ProgressCallback | None = None) -> Iterator[tuple[str, Tensor]]:
        """Walk the tensors, one in memory at a time.

        Args:
            on_progress: called after the caller is done with a tensor.

        Yields:
            (parameter name, CPU tensor). A tensor may be a view of a mapped file: copy it, and never write to it.
            Names that the mapping does not know are passed on as they are.

        Raises:
            CheckpointError: a tensor cannot be decoded.
        """
        return self.weights.tensors(on_progress)


def _dtype_of(config: "PretrainedConfig") -> torch.dtype | None:
    """The configuration's dtype; some versions of transformers keep it as a string."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None
