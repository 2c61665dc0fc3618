"""Puts an engine together: :func:`build_engine`, from a model's name and the options to a running loop.

The order: load the model, compile kernels, size the KV cache, make queues, device state and ring, start the loop. Runs
in the thread that asks for the engine.
"""

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gapless.config import EngineConfig
from gapless.engine.admission import MAX_ENDING_TOKENS, AdmissionLimits
from gapless.engine.block_pool import BlockPool
from gapless.engine.compile_ahead import compile_ahead
from gapless.engine.device_kernels import DeviceKernels, device_kernels
from gapless.engine.engine import Engine, OutputSink
from gapless.engine.memory import graph_pool_bytes, plan_kv_cache
from gapless.engine.prefix_cache import PrefixCache
from gapless.engine.scheduler import Scheduler, SchedulerLimits
from gapless.engine.step_assembly import make_device_step
from gapless.engine.step_buckets import step_buckets
from gapless.engine.warm_up import warm_up
from gapless.errors import ConfigError
from gapless.model.kv_cache import KVCache
from gapless.model.loading import LoadedModel, NoProgress, Progress, load_model
from gapless.model.runner import ModelRunner
from gapless.model.spec import kv_shape
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.device_step import StepExecutor
from gapless.pipeline.graphs import CudaRecorder, GraphedStep
from gapless.pipeline.logprobs import LogprobLimits
from gapless.pipeline.padding import StepBuckets
from gapless.pipeline.ring import Ring
from gapless.pipeline.step_buffers import BufferLimits
from gapless.pipeline.streams.cpu import CpuQueues, Delays
from gapless.pipeline.streams.cuda import CudaQueues
from gapless.pipeline.streams.protocol import Queues
from gapless.pipeline.wide_rows import WideLimits
from gapless.sampling.logits_hook import LogitsProcessor
from gapless.timeline.recorder import TimelineRecorder
from gapless.timeline.spans import DeviceLimits
from gapless.timeline.step_recorder import NO_TIMELINE

__all__ = ["BuiltEngine", "build_engine", "check_capability", "resolve_device"]

_log = logging.getLogger("gapless")

# Ampere.
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """A running engine and what was decided while it was built.

    Attributes:
        max_model_len: the longest context of one request: the least of the model's, the user's and the cache's.
        executor: what runs the steps, kernel by kernel or as graphs.
        ring, kv: the engine's own; others may use them while it has no request, as benchmarks do.
        buckets: sizes that steps are padded to, if any.
        start_s: seconds that building took.
    """

    engine: Engine
    loaded: LoadedModel
    executor: StepExecutor
    ring: Ring
    kv: KVCache
    max_model_len: int
    buckets: StepBuckets | None
    start_s: float

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache that requests can have."""
        return self.kv.num_blocks

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self.kv.num_blocks * self.kv.block_size


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        ConfigError: CUDA was asked for and is not there, or the GPU is too old.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' was asked for and torch sees no CUDA device: run `gapless doctor`")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    device = torch.device(name, torch.cuda.current_device())
    check_capability(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return device


def check_capability(device_name: str, capability: tuple[int, int]) -> None:
    """Raise :class:`ConfigError` for a GPU without bf16 and asynchronous copies, which our kernels are made of."""
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"device {device_name!r} has compute capability {capability[0]}.{capability[1]}, "
            "and gapless needs 8.0 (Ampere) or later: use device='cpu'"
        )


def _on_device(config: EngineConfig) -> tuple[torch.device, EngineConfig]:
    """The device, and the options with what it decides filled in."""
    device = resolve_device(config.device)
    return device, config.for_device(device.type)


def build_engine(
    model: str | Path,
    config: EngineConfig,
    sink: OutputSink,
    *,
    progress: Progress | None = None,
    delays: Delays | None = None,
    logits_processor: LogitsProcessor | None = None,
    on_submit: Callable[[ScheduledBatch], None] = lambda batch: None,
    capture_ahead: bool = False,
) -> BuiltEngine:
    """Load ``model`` and start an engine on it.

    Args:
        model: a folder, a GGUF file, a name the engine knows, or a hub name.
        config: the options.
        sink: hears of tokens and ends, in the engine's thread.
        progress: told about the stages of loading.
        logits_processor: a user's change of the logits, on the compute stream.
        delays: stretches the work of CPU streams; for tests and demonstrations.
        on_submit: shown every batch, in the engine's thread; for tests and benchmarks.
        capture_ahead: capture all graphs before the engine starts, for those who time it.

    Raises:
        ConfigError, CheckpointError: before anything runs.
    """
    began_s = time.perf_counter()
    device, config = _on_device(config)
    kernels = device_kernels(device)
    progress = progress or NoProgress()
    queues: Queues = CpuQueues(delays) if device.type == "cpu" else CudaQueues(device)
    loaded = _load(model, config, kernels, queues, progress)
    progress.stage("allocate KV cache")
    pool_bytes = graph_pool_bytes(config, loaded.model)
    kv = _make_cache(config, loaded, pool_bytes)
    max_model_len = _max_model_len(config, loaded, kv)
    parts = _make_parts(config, loaded, kv, queues, kernels, max_model_len, pool_bytes, logits_processor)
    engine = Engine(
        scheduler=_make_scheduler(config, kv.num_blocks, parts.buckets, parts.limits),
        ring=parts.ring,
        sink=sink,
        limits=_admission_limits(config, loaded, kv, max_model_len),
        step_timeout_s=config.step_timeout_s,
        on_close=queues.close,
        on_submit=on_submit,
        timeline=parts.timeline,
    )
    if parts.buckets is not None:
        warm_up(parts.ring, parts.buckets, progress, capture_for=config.depth if capture_ahead else 0)
    engine.start()
    return BuiltEngine(
        engine=engine,
        loaded=loaded,
        executor=parts.executor,
        ring=parts.ring,
        kv=kv,
        max_model_len=max_model_len,
        buckets=parts.buckets,
        start_s=time.perf_counter() - began_s,
    )


def _load(
    model: str | Path,
    config: EngineConfig,
    kernels: DeviceKernels,
    queues: Queues,
    progress: Progress,
) -> LoadedModel:
    """Load the model; on CUDA, compile what its steps launch, the one that measures memory among them."""
    loaded = load_model(
        model,
        load_format=config.load_format,
        dtype=config.dtype,
        device=queues.device,
        max_model_len=config.max_model_len,
        attention=kernels.attention,
        ops=kernels.ops,
        seed=config.seed,
        progress=progress,
    )
    if queues.device.type == "cuda":
        progress.stage("compile kernels")
        compile_ahead(loaded.model, config, kernels, queues)
    return loaded


def _make_cache(config: EngineConfig, loaded: LoadedModel, pool_bytes: int) -> KVCache:
    shape = kv_shape(loaded.spec, loaded.dtype)
    model_len = config.max_model_len or loaded.config_max_model_len
    plan = plan_kv_cache(config, loaded.model, shape, model_len=model_len, pool_bytes=pool_bytes)
    kv = KVCache(shape, num_blocks=plan.num_blocks, block_size=config.block_size, device=loaded.model.device)
    _log.info(
        "KV cache: %d tokens (%d blocks of %d, %.2f GiB; %s)",
        plan.num_blocks * config.block_size,
        plan.num_blocks,
        config.block_size,
        kv.nbytes / 2**30,
        plan.reason,
    )
    return kv


def _max_model_len(config: EngineConfig, loaded: LoadedModel, kv: KVCache) -> int:
    max_model_len = min(config.max_model_len or loaded.config_max_model_len, kv.num_blocks * config.block_size)
    _log.info("max_model_len: %d (the model allows %d)", max_model_len, loaded.config_max_model_len)
    return max_model_len


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """What steps run on, and how large they may be."""

    limits: BufferLimits
    buckets: StepBuckets | None
    executor: StepExecutor
    timeline: TimelineRecorder | None
    ring: Ring


def _make_parts(
    config: EngineConfig,
    loaded: LoadedModel,
    kv: KVCache,
    queues: Queues,
    kernels: DeviceKernels,
    max_model_len: int,
    pool_bytes: int,
    processor: LogitsProcessor | None,
) -> _Parts:
    max_blocks = -(-max_model_len // config.block_size)
    limits = _buffer_limits(config, max_model_len, max_blocks, loaded.spec.vocab_size)
    buckets = step_buckets(config, loaded.model)
    runner = ModelRunner(loaded.model, kv)
    step = make_device_step(config, runner, limits, kernels, max_blocks=max_blocks, processor=processor)
    executor: StepExecutor = step
    if buckets is not None and pool_bytes:
        executor = GraphedStep(step, CudaRecorder(pool_bytes), buckets)
    timeline = _timeline_of(config, loaded, queues) if config.timeline else None
    ring = Ring(
        queues=queues, depth=config.depth, limits=limits, device_step=executor, timeline=timeline or NO_TIMELINE
    )
    return _Parts(limits=limits, buckets=buckets, executor=executor, timeline=timeline, ring=ring)


def _admission_limits(config: EngineConfig, loaded: LoadedModel, kv: KVCache, max_model_len: int) -> AdmissionLimits:
    return AdmissionLimits(
        vocab_size=loaded.spec.vocab_size,
        max_model_len=max_model_len,
        kv_capacity=kv.num_blocks * config.block_size,
        max_waiting=config.max_waiting,
    )


def _buffer_limits(config: EngineConfig, max_model_len: int, max_blocks: int, vocab_size: int) -> BufferLimits:
    return BufferLimits(
        max_tokens=max(config.step_tokens, config.max_rows),
        max_rows=config.max_rows,
        # A step allocates blocks for its tokens, and admitted requests bring cached ones: one of any length, then more
        # while there is room.
        max_changes=config.step_tokens + config.max_rows + max(max_blocks, 4096),
        max_masked=config.max_rows * MAX_ENDING_TOKENS,
        wide=WideLimits.of_engine(max_rows=config.max_rows, vocab_size=vocab_size, max_model_len=max_model_len),
        logprobs=LogprobLimits.of_engine(token_budget=config.step_tokens, vocab_size=vocab_size),
    )


def _make_scheduler(
    config: EngineConfig, num_blocks: int, buckets: StepBuckets | None, buffers: BufferLimits
) -> Scheduler:
    limits = SchedulerLimits(
        max_rows=config.max_rows,
        token_budget=config.step_tokens,
        chunk_size=config.chunk_tokens,
        block_size=config.block_size,
        max_changes=buffers.max_changes,
        prefix_caching=config.enable_prefix_caching,
        buckets=buckets,
        wide=buffers.wide,
        logprobs=buffers.logprobs,
    )
    return Scheduler(limits, BlockPool(num_blocks, PrefixCache()))


def _timeline_of(config: EngineConfig, loaded: LoadedModel, queues: Queues) -> TimelineRecorder:
    device = queues.device
    spec, shape = loaded.spec, kv_shape(loaded.spec, loaded.dtype)
    windows = [window for window in spec.windows if window is not None]
    assert len(set(windows)) <= 1, "a family has one window"
    limits = DeviceLimits(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU",
        weight_bytes=loaded.model.weight_bytes,
        kv_bytes_per_token=shape.bytes_per_token,
        read_bytes_per_s=None,
        window=windows[0] if windows else None,
        window_kv_bytes_per_token=shape.bytes_per_token * len(windows) // spec.num_layers,
    )
    return TimelineRecorder(source=queues, device=device, depth=config.depth, limits=limits)
