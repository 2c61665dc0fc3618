"""What has one form for CPUs and one for CUDA, chosen in one place: :func:`device_kernels`.

Immutable; made once by whoever builds an engine.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gapless.layers.attention import AttentionBackend, TorchAttention
from gapless.layers.ops import LayerOps, TorchOps
from gapless.pipeline.step_edges import StepEdges, TorchEdges
from gapless.sampling.drawing import Draw, draw_tokens
from gapless.sampling.penalties import PenaltyKernel, apply_penalties
from gapless.sampling.sampler import Largest, largest_logits

__all__ = ["DeviceKernels", "device_kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKernels:
    """The forms of everything that has one form for CPUs and one for CUDA.

    ``compile_only``: kernels launched in its block are compiled, side by side, and not run.
    """

    attention: AttentionBackend[Any]
    ops: LayerOps
    draw: Draw
    penalties: PenaltyKernel
    largest: Largest
    edges: StepEdges
    compile_only: Callable[[], AbstractContextManager[None]]


def device_kernels(device: torch.device) -> DeviceKernels:
    """Plain torch on CPUs, kernels of ours on CUDA."""
    if device.type == "cpu":
        return DeviceKernels(
            attention=TorchAttention(),
            ops=TorchOps(),
            draw=draw_tokens,
            penalties=apply_penalties,
            largest=largest_logits,
            edges=TorchEdges(),
            compile_only=nullcontext,
        )
    # Imported where they are used: a CPU machine need not have Triton.
    from gapless.kernels.draw import draw_tokens_triton
    from gapless.kernels.launch import compile_only
    from gapless.kernels.layer_ops import TritonOps
    from gapless.kernels.paged_attention import TritonAttention
    from gapless.kernels.penalties import apply_penalties_triton
    from gapless.kernels.step_edges import TritonEdges, largest_logits_triton

    return DeviceKernels(
        attention=TritonAttention.for_device(device),
        ops=TritonOps.for_device(device),
        draw=draw_tokens_triton,
        penalties=apply_penalties_triton,
        largest=largest_logits_triton,
        edges=TritonEdges(),
        compile_only=compile_only,
    )
