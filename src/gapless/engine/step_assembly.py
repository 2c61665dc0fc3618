"""Puts a step's work on the device together: :func:`make_device_step`, for an engine and for what compiles ahead of it.

No state; runs in the thread that builds an engine.
"""

from gapless.config import EngineConfig
from gapless.engine.device_kernels import DeviceKernels
from gapless.model.runner import ModelRunner
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.step_buffers import BufferLimits
from gapless.sampling.logits_hook import LogitsProcessor
from gapless.sampling.sampler import Sampler
from gapless.sampling.wide_state import WideState

__all__ = ["make_device_step"]


def make_device_step(
    config: EngineConfig,
    runner: ModelRunner,
    limits: BufferLimits,
    kernels: DeviceKernels,
    *,
    max_blocks: int,
    processor: LogitsProcessor | None,
) -> DeviceStep:
    """Device state by row, and the work of a step over ``runner``'s cache."""
    device, vocab_size = runner.model.device, runner.vocab_size
    wide = WideState(
        num_rows=limits.wide.max_rows,
        vocab_size=vocab_size,
        device=device,
        penalty_kernel=kernels.penalties,
    )
    sampler = Sampler(max_rows=config.max_rows, device=device, wide=wide, draw=kernels.draw, largest=kernels.largest)
    if device.type == "cuda":
        sampler.warm_up(vocab_size)
    return DeviceStep(
        model=runner,
        sampler=sampler,
        max_rows=config.max_rows,
        max_blocks_per_row=max_blocks,
        block_size=config.block_size,
        device=device,
        edges=kernels.edges,
        logits_processor=processor,
    )
