"""Which sizes an engine pads its steps to: :func:`step_buckets`.

No state; runs in the thread that builds an engine.
"""

from gapless.config import EngineConfig
from gapless.model.decoder import DecoderModel
from gapless.pipeline.padding import StepBuckets, decode_buckets, mixed_buckets

__all__ = ["step_buckets"]

# Launching a layer's kernels takes the host some 0.25 ms. Meanwhile an H200 multiplies about this many times, at the
# rate that steps of some hundred tokens reach: a step with more multiplications than that in a layer hides its own
# launch. For Llama-3.1-8B that are 275 tokens (``benchmarks/kernels/mixed_step.py``).
_HIDES_ITS_LAUNCH = 6e10


def step_buckets(config: EngineConfig, model: DecoderModel) -> StepBuckets | None:
    """The sizes for a model on CUDA; ``None`` on a CPU, which replays nothing.

    They do not depend on whether there are graphs: the same shapes give the same bits, so that a run with graphs can be
    compared with one without.

    Args:
        config: with the device's defaults.
        model: its shape decides which steps are too small to hide their launch.
    """
    if model.device.type != "cuda":
        return None
    multiplications = sum(linear.shape.numel() for linear in model.layers[0].linears)
    most = min(config.step_tokens, int(_HIDES_ITS_LAUNCH / multiplications))
    return StepBuckets(num_rows=config.max_rows, decode=decode_buckets(config.max_rows), mixed=mixed_buckets(most))
