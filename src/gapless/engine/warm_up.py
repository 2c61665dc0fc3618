"""Steps in which nobody takes part, run before the first one that counts: :func:`warm_up`.

The idea: whatever is done once, loading a kernel, sizing the graphs' memory pool, capturing a graph, can be had by
running an idle step of the same shape. Keeps no state; runs in the thread that builds an engine, before the engine's
own thread is there to use the ring.
"""

import torch

from gapless.engine.compile_ahead import KERNEL_WIDTHS
from gapless.model.loading import Progress
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.padding import StepBuckets, idle_decode_batch, idle_mixed_batch
from gapless.pipeline.ring import Ring

__all__ = ["warm_up"]


def warm_up(ring: Ring, buckets: StepBuckets, progress: Progress, *, capture_for: int = 0) -> None:
    """On CUDA, run the largest step of each kind first, then smaller decodes.

    They load the kernels of decode, of which there is one for each width. The largest ones' graphs come first, so that
    whatever the memory pool may lack shows before anybody waits.

    Args:
        ring: the engine's.
        buckets: sizes of its steps.
        progress: told about this stage, and the next one if there is one.
        capture_for: with how many sets of buffers, one after another, a step of every size is run: with all of them,
            every graph is captured that there can be.
    """
    progress.stage("warm up")
    # Weights and buffers were made on the default stream, which orders nothing for ours.
    torch.cuda.synchronize()
    rows = buckets.num_rows
    largest = [idle_decode_batch(rows, rows), *(idle_mixed_batch(size, rows) for size in buckets.mixed[-1:])]
    largest.sort(key=lambda batch: -len(batch.input_ids))
    _run(ring, largest + [idle_decode_batch(width, rows) for width in KERNEL_WIDTHS if width < rows])
    if capture_for:
        progress.stage("capture graphs")
        decodes = [idle_decode_batch(size, rows) for size in buckets.decode]
        _run(ring, decodes + [idle_mixed_batch(size, rows) for size in buckets.mixed], times=capture_for)


def _run(ring: Ring, batches: list[ScheduledBatch], *, times: int = 1) -> None:
    """Run each step by itself, ``times`` times in a row, each with the next set of buffers."""
    for batch in (batch for batch in batches for _ in range(times)):
        ring.submit(batch)
        ring.collect()
