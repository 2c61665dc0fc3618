"""The engine's options: :class:`EngineConfig`, checked once where they are given and frozen from then on."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from gapless.errors import ConfigError

__all__ = ["ONLINE_TOKEN_BUDGET", "DeviceName", "EngineConfig"]

DeviceName = Literal["auto", "cuda", "cpu"]

ONLINE_TOKEN_BUDGET = 2048
"""Where tokens are waited for one by one: a step of so many tokens of an 8B model takes an H200 some 55 ms."""
_CUDA_TOKEN_BUDGET = 8192
_CPU_TOKEN_BUDGET = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How an engine runs a model.

    Args:
        depth: most steps in flight. 1 waits for each step; 2 lets the host work while the device computes; 3 hides
            host jitter as well. Each further depth costs about one step of time to first token.
        device: ``auto`` takes CUDA if there is one.
        dtype: ``auto`` is bf16 on CUDA and fp32 on a CPU; or ``float32``, ``bfloat16``, ``float16``.
        load_format: ``auto`` reads weights; ``dummy`` draws random ones (speed does not depend on their values).
        seed: of the random weights.
        max_model_len: longest context, in tokens; ``None`` is the largest that the model and the KV cache allow.
        max_rows: most requests on the device at once.
        token_budget: most tokens in a step. Large ones read the weights less often while prompts are processed, small
            ones keep the others' next tokens from waiting for long. ``None`` is 8192 on CUDA and 2048 on a CPU, and
            2048 wherever tokens are streamed (:class:`~gapless.AsyncLLM`, ``gapless serve``, ``gapless chat``).
        chunk_size: most tokens of one request in a step; ``None`` leaves it to the budget.
        max_waiting: most requests queued and not yet running; more are refused.
        block_size: tokens in a KV block, a power of two.
        num_blocks: KV blocks; ``None`` takes ``kv_cache_memory_bytes``.
        kv_cache_memory_bytes: memory of the KV cache; ``None`` takes what is free (CUDA) or a share of memory (CPU).
        gpu_memory_utilization: share of the GPU's memory that weights, activations and KV cache may take together.
        cuda_graphs: replay steps of few tokens as CUDA graphs; off launches their kernels one by one, with the same
            results. Means nothing on a CPU.
        enable_prefix_caching: keep full blocks for later prompts that start alike.
        step_timeout_s: a step that takes longer fails the engine instead of hanging its callers, in seconds.
        timeline: record when host and device worked on each step, for the newest steps and as sums over all.

    Raises:
        ConfigError: (a ``ValueError``) naming option, value and limit.
    """

    depth: int = 2
    device: DeviceName = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_rows: int = 256
    token_budget: int | None = None
    chunk_size: int | None = None
    max_waiting: int = 1_000_000
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    cuda_graphs: bool = True
    enable_prefix_caching: bool = True
    step_timeout_s: float = 300.0
    timeline: bool = False

    def __post_init__(self) -> None:
        _at_least("depth", self.depth, 1, 16)
        _at_least("max_rows", self.max_rows, 1, 65_536)
        _at_least("max_waiting", self.max_waiting, 1, None)
        _at_least("block_size", self.block_size, 1, 4096)
        if self.token_budget is not None:
            _at_least("token_budget", self.token_budget, 1, 1 << 20)
        for name in ("max_model_len", "chunk_size", "num_blocks", "kv_cache_memory_bytes"):
            if (value := getattr(self, name)) is not None:
                _at_least(name, value, 1, None)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size={self.block_size} must be a power of two")
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ConfigError("num_blocks and kv_cache_memory_bytes both set the KV cache's size: give one of them")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1]")
        if not self.step_timeout_s > 0:
            raise ConfigError(f"step_timeout_s={self.step_timeout_s} must be positive")
        for name, allowed in (
            ("device", ("auto", "cuda", "cpu")),
            ("dtype", ("auto", "float32", "bfloat16", "float16")),
            ("load_format", ("auto", "dummy")),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is unknown; use one of {', '.join(allowed)}")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> "EngineConfig":
        """Build from keyword options; an unknown name is an error and never dropped."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(known))}")
        return cls(**options)

    def for_streams(self) -> "EngineConfig":
        """With the token budget of those who wait for each token, unless one was given."""
        return self if self.token_budget is not None else replace(self, token_budget=ONLINE_TOKEN_BUDGET)

    def for_device(self, device_type: str) -> "EngineConfig":
        """With what the type of device, ``cuda`` or ``cpu``, decides filled in."""
        if self.token_budget is not None:
            return self
        return replace(self, token_budget=_CUDA_TOKEN_BUDGET if device_type == "cuda" else _CPU_TOKEN_BUDGET)

    @property
    def step_tokens(self) -> int:
        """Most tokens in a step, once the device is known."""
        assert self.token_budget is not None, "for_device() comes first"
        return self.token_budget

    @property
    def chunk_tokens(self) -> int:
        """Most tokens of one request in a step: a chunk larger than the budget could never be scheduled whole."""
        return self.step_tokens if self.chunk_size is None else min(self.chunk_size, self.step_tokens)


def _at_least(name: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
    if most is not None and value > most:
        raise ConfigError(f"{name}={value} is above the limit of {most}")
