"""The arrays of a batch as lists, for tests that say what they must hold: :func:`lists_of`."""

import numpy as np

from gapless.pipeline.batch import ScheduledBatch

__all__ = ["ARRAYS", "lists_of"]

ARRAYS = (
    "input_ids",
    "positions",
    "carry",
    "token_rows",
    "query_lens",
    "seq_lens",
    "rows",
    "sample_tokens",
    "sample_rows",
    "output_positions",
    "random_samples",
)


def lists_of(batch: ScheduledBatch) -> dict[str, list[int]]:
    """Every array by its name; all of them are int32."""
    for name in ARRAYS:
        assert getattr(batch, name).dtype == np.int32, name
    return {name: getattr(batch, name).tolist() for name in ARRAYS}
