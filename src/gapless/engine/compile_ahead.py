"""Compiles the kernels of an engine's steps before its first one: :func:`compile_ahead`.

The idea: a kernel is compiled when it is first launched, for a second or so, while everybody waits; with nothing on
disk from an earlier process that is some dozens of times, one after the other. Which variants there are follows from
the shapes of steps, and few shapes have them all: one for each width of the products, with and without prompts. So
idle steps of these shapes are gone through without being run, and what they would launch is compiled side by side.

What is left to the step that meets it first: penalties, whose kernel few requests need, and whatever a step of more
than 1,024 entries or tiles of prompts has of its own. Keeps no state; runs in the thread that builds an engine.
"""

import numpy as np
import torch

from gapless.config import EngineConfig
from gapless.engine.device_kernels import DeviceKernels
from gapless.engine.step_assembly import make_device_step
from gapless.model.decoder import DecoderModel
from gapless.model.kv_cache import KVCache
from gapless.model.runner import ModelRunner
from gapless.model.spec import kv_shape
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.protocol import Queues

__all__ = ["KERNEL_WIDTHS", "compile_ahead"]

KERNEL_WIDTHS = (128, 64, 32, 16)
"""Steps of up to so many tokens run their own kernels (gapless.kernels.skinny, which a CPU machine cannot import)."""

# A prompt of so many tokens has tiles for every multiprocessor, which a kernel of its own may do.
_LONG_PROMPT = 2048


def compile_ahead(model: DecoderModel, config: EngineConfig, kernels: DeviceKernels, queues: Queues) -> None:
    """Compile what steps of ``model`` launch, for a cache of another size as well; waits for the compiler.

    Args:
        model: with its weights.
        config: with the device's defaults.
        kernels: the engine's.
        queues: make the buffers.
    """
    rows = config.max_rows
    longest = min(_LONG_PROMPT, config.step_tokens, model.max_model_len)
    prompts = {longest, *(min(width, longest) for width in KERNEL_WIDTHS if width > rows or width == KERNEL_WIDTHS[-1])}
    shapes = [*((1,) * min(width, rows) for width in (*KERNEL_WIDTHS, rows)), *((length,) for length in prompts)]
    kv = KVCache(kv_shape(model.spec, model.dtype), num_blocks=0, block_size=config.block_size, device=model.device)
    limits = BufferLimits(max_tokens=max(longest, rows), max_rows=rows, max_changes=0, max_masked=0)
    buffers = StepBuffers(queues, limits)
    with torch.inference_mode(), kernels.compile_only():
        blocks = -(-longest // config.block_size)
        step = make_device_step(config, ModelRunner(model, kv), limits, kernels, max_blocks=blocks, processor=None)
        for query_lens in dict.fromkeys(shapes):
            batch = _idle_batch(query_lens, reserved_row=rows)
            layout = buffers.write(batch)
            buffers.device_in.copy_(buffers.host_in)
            step.sample(step.forward(batch, layout, buffers), batch, layout, buffers)
    # What this took on the current stream is of no use to the engine's.
    torch.cuda.empty_cache()


def _idle_batch(query_lens: tuple[int, ...], *, reserved_row: int) -> ScheduledBatch:
    """A step in which nobody takes part: all on the reserved row, whose blocks are block 0, and one token drawn."""
    builder = BatchBuilder(step=-1)
    for num_tokens in query_lens:
        entry = BatchEntry(
            request_id=-1,
            residency=0,
            row=reserved_row,
            start=0,
            num_tokens=num_tokens,
            final=True,
            samples=True,
            carries=False,
            output_position=0,
        )
        builder.add_chunk(entry, np.zeros(num_tokens, dtype=np.int32))
    builder.random_samples.append(0)
    return builder.build()
