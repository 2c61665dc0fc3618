"""Which samples of a step use an option, and where its state lies: :class:`RowSamples`."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["RowSamples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSamples:
    """Samples of a step with the wide rows of their requests; no row is there twice.

    Attributes:
        samples: ``[n]``, int64: rows of the step's logits.
        rows: ``[n]``, int64: rows of the sampler's wide tables.
    """

    samples: Tensor
    rows: Tensor
