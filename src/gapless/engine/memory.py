"""How large the KV cache is: :func:`plan_kv_cache`, from the user's word or from what is free.

On CUDA the activation peak of the largest step is measured by running it, never guessed. Called once, by the thread
that builds the engine.
"""

from dataclasses import dataclass

import psutil
import torch

from gapless.config import EngineConfig
from gapless.engine.step_buckets import step_buckets
from gapless.errors import ConfigError
from gapless.model.decoder import DecoderModel
from gapless.model.kv_cache import KVShape
from gapless.model.runner import measure_activation_peak
from gapless.pipeline.graphs import SMALL_TENSORS_BYTES

__all__ = ["KVPlan", "graph_pool_bytes", "plan_kv_cache"]

# A CPU shares its memory with everything else on the machine: a quarter of what is free, at most this much.
_CPU_SHARE = 0.25
_CPU_MOST_BYTES = 4 << 30
# Tensors that come and go leave gaps in a pool, and the bounds of a recorded step need a little more than lengths do.
_POOL_SLACK = 1.25
_POOL_SPARE_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class KVPlan:
    """The cache's size and where it comes from.

    Attributes:
        num_blocks: blocks for requests; one more is reserved.
        reason: for the log, in words.
    """

    num_blocks: int
    reason: str


def plan_kv_cache(
    config: EngineConfig, model: DecoderModel, shape: KVShape, *, model_len: int, pool_bytes: int
) -> KVPlan:
    """Choose the number of blocks.

    Args:
        config: the user's options.
        model: with its weights on the device.
        shape: what a token costs.
        model_len: positions that the model's configuration (or the user) allows.
        pool_bytes: of the graphs' memory pool, which is made later; 0 without graphs.

    Raises:
        ConfigError: not one block fits, or ``max_model_len`` was asked for and does not fit.
    """
    block_bytes = shape.bytes_per_token * config.block_size
    if config.num_blocks is not None:
        num_blocks, reason = config.num_blocks, f"num_blocks={config.num_blocks}"
    else:
        available, reason = _available_bytes(config, model, pool_bytes)
        # More than every row at full length can never be used.
        most = config.max_rows * -(-model_len // config.block_size)
        num_blocks = min(available // block_bytes - 1, most)
    if num_blocks < 1:
        raise ConfigError(
            f"not one KV block of {block_bytes} bytes fits ({reason}): raise kv_cache_memory_bytes or "
            "gpu_memory_utilization, or use a smaller model"
        )
    capacity = num_blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > capacity:
        raise ConfigError(
            f"max_model_len={config.max_model_len} needs more KV cache than the {capacity} tokens that fit ({reason}): "
            "lower it or give the cache more memory"
        )
    return KVPlan(num_blocks=num_blocks, reason=reason)


def _available_bytes(config: EngineConfig, model: DecoderModel, pool_bytes: int) -> tuple[int, str]:
    if config.kv_cache_memory_bytes is not None:
        return (config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}")
    if model.device.type != "cuda":
        free = psutil.virtual_memory().available
        return (min(int(free * _CPU_SHARE), _CPU_MOST_BYTES), f"a share of {free / 2**30:.1f} GiB free memory")
    peak = measure_activation_peak(
        model, token_budget=config.step_tokens, max_rows=config.max_rows, block_size=config.block_size
    )
    if pool_bytes:
        peak += _graph_bytes(config, model, pool_bytes)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    # What others hold on this GPU counts against the share as our own does.
    budget = free - int(total * (1 - config.gpu_memory_utilization)) - peak
    return (
        max(budget, 0),
        f"{config.gpu_memory_utilization:.0%} of {total / 2**30:.1f} GiB less weights and a measured activation peak "
        f"of {peak / 2**30:.2f} GiB",
    )


def graph_pool_bytes(config: EngineConfig, model: DecoderModel) -> int:
    """How large the memory pool of CUDA graphs is to be: for the largest step's activations, and some to spare.

    0 where there are no graphs.
    """
    if model.device.type != "cuda" or not config.cuda_graphs:
        return 0
    rows, largest = config.max_rows, _largest_graphed(config, model)
    peak = measure_activation_peak(model, token_budget=largest, max_rows=rows, block_size=config.block_size)
    return int(peak * _POOL_SLACK) + _POOL_SPARE_BYTES + SMALL_TENSORS_BYTES


def _graph_bytes(config: EngineConfig, model: DecoderModel, pool_bytes: int) -> int:
    """What graphs hold: their pool, and static tensors for logits and hidden states."""
    logits = config.max_rows * model.spec.vocab_size * torch.float32.itemsize
    return pool_bytes + logits + _largest_graphed(config, model) * model.spec.hidden_size * model.dtype.itemsize


def _largest_graphed(config: EngineConfig, model: DecoderModel) -> int:
    """Tokens of the largest step that is a graph: the larger of the two kinds needs more of everything."""
    buckets = step_buckets(config, model)
    assert buckets is not None, "graphs are of CUDA"
    return max((buckets.num_rows, *buckets.mixed))
