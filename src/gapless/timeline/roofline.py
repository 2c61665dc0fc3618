"""How fast a step could be at best: a decode step reads all weights and all KV of its contexts, and does little else.

So the bytes it must read, over the read bandwidth measured on this very device, are a floor for its time, and floor
over time is its share of the roofline (S. Williams, A. Waterman, D. Patterson, "Roofline", CACM 52(4), 2009). It tells
useful work from a device that is merely busy. Steps with prefill are bound by arithmetic instead and are left out.

Pure functions, except :func:`measure_read_bandwidth`, which keeps the device busy and belongs where nothing runs.
"""

import time
from dataclasses import dataclass

import psutil
import torch

from gapless.errors import ConfigError
from gapless.timeline.idle import IdleMeter, metered
from gapless.timeline.spans import DeviceLane, DeviceLimits, Recording, StepRecord

__all__ = [
    "Roofline",
    "RooflineMeter",
    "measure_read_bandwidth",
    "min_read_bytes",
    "read_bytes",
    "roofline_of",
    "step_share",
]

# What is read to measure. Less than the least would be read from a cache: 50 MB of L2 on the largest GPUs.
_MOST_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
_LEAST_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}
_REPEATS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Decode steps against the least time that reading takes.

    Attributes:
        decode_steps: steps without prefill.
        read_bytes: what they had to read.
        busy_s: the time they computed.
        elapsed_s: the same with the idle time before each of them.
        read_bytes_per_s: of the device; ``None`` where nobody measured.
    """

    decode_steps: int
    read_bytes: int
    busy_s: float
    elapsed_s: float
    read_bytes_per_s: float | None

    @property
    def floor_s(self) -> float | None:
        """The least time that reading takes."""
        return None if self.read_bytes_per_s is None else self.read_bytes / self.read_bytes_per_s

    @property
    def share(self) -> float | None:
        """Floor over elapsed time, idle time included: what a user gets of this device."""
        return None if self.floor_s is None or not self.elapsed_s else self.floor_s / self.elapsed_s

    @property
    def busy_share(self) -> float | None:
        """Floor over compute time: how good the kernels are."""
        return None if self.floor_s is None or not self.busy_s else self.floor_s / self.busy_s

    def since(self, earlier: "Roofline") -> "Roofline":
        """What was added after ``earlier``."""
        return Roofline(
            decode_steps=self.decode_steps - earlier.decode_steps,
            read_bytes=self.read_bytes - earlier.read_bytes,
            busy_s=self.busy_s - earlier.busy_s,
            elapsed_s=self.elapsed_s - earlier.elapsed_s,
            read_bytes_per_s=self.read_bytes_per_s,
        )


def min_read_bytes(limits: DeviceLimits, *, num_context_tokens: int, num_window_tokens: int) -> int:
    """What a step must read: the weights once, and K and V of every context.

    Args:
        limits: of model and device.
        num_context_tokens: of all entries together.
        num_window_tokens: the same, each cut to what a layer with a sliding window reads.
    """
    windowed = limits.window_kv_bytes_per_token
    full = limits.kv_bytes_per_token - windowed
    return limits.weight_bytes + full * num_context_tokens + windowed * num_window_tokens


def read_bytes(step: StepRecord, limits: DeviceLimits) -> int:
    """What a recorded step had to read, in bytes."""
    return min_read_bytes(limits, num_context_tokens=step.num_context_tokens, num_window_tokens=step.num_window_tokens)


def step_share(step: StepRecord, limits: DeviceLimits) -> float | None:
    """A step's share of the roofline while it computed; ``None`` for one with prefill, or without a bandwidth."""
    busy_s = step.device[DeviceLane.COMPUTE].duration_s
    if limits.read_bytes_per_s is None or step.num_prefill_tokens or not busy_s:
        return None
    return read_bytes(step, limits) / limits.read_bytes_per_s / busy_s


def roofline_of(recording: Recording) -> Roofline:
    """The decode steps of a recording together."""
    totals = RooflineMeter()
    for record, grown_s in metered(recording, IdleMeter()):
        if not record.num_prefill_tokens:
            totals.add(read_bytes(record, recording.limits), record.device[DeviceLane.COMPUTE].duration_s, grown_s)
    return totals.roofline(recording.limits.read_bytes_per_s)


class RooflineMeter:
    """Adds up decode steps, one at a time. Belongs to whoever feeds it."""

    def __init__(self) -> None:
        self._decode_steps = 0
        self._read_bytes = 0
        self._busy_s = 0.0
        self._elapsed_s = 0.0

    def add(self, num_bytes: int, busy_s: float, elapsed_s: float) -> None:
        """Count a step that had to read ``num_bytes``."""
        self._decode_steps += 1
        self._read_bytes += num_bytes
        self._busy_s += busy_s
        self._elapsed_s += elapsed_s

    def roofline(self, read_bytes_per_s: float | None) -> Roofline:
        """The sums so far, for a device that reads so fast."""
        return Roofline(
            decode_steps=self._decode_steps,
            read_bytes=self._read_bytes,
            busy_s=self._busy_s,
            elapsed_s=self._elapsed_s,
            read_bytes_per_s=read_bytes_per_s,
        )


def measure_read_bandwidth(device: torch.device) -> float:
    """Bytes a second of the best plain read of this device's memory: the fastest of ten sums over a large tensor.

    Takes up to some tenths of a second, and up to half of the memory that is free, which it gives back. Nothing else
    may run on the device meanwhile.

    Raises:
        ConfigError: too little memory is free to measure more than a cache.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    free = torch.cuda.mem_get_info(device)[0] if kind == "cuda" else psutil.virtual_memory().available
    size = min(_MOST_BYTES[kind], free // 2)
    if size < _LEAST_BYTES[kind]:
        raise ConfigError(
            f"{free} bytes of memory are free, and measuring the read bandwidth of {device} needs "
            f"{2 * _LEAST_BYTES[kind]}: lower gpu_memory_utilization or the size of the KV cache"
        )
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    seconds = _cuda_seconds if kind == "cuda" else _cpu_seconds
    best_s = min(seconds(data) for _ in range(_REPEATS))
    num_bytes = data.nbytes
    del data
    if kind == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / best_s


def _cuda_seconds(data: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # Events are recorded on the thread's present device, which need not be the engine's.
    with torch.cuda.device(data.device):
        start.record()
        data.sum()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _cpu_seconds(data: torch.Tensor) -> float:
    start_s = time.perf_counter()
    data.sum()
    return time.perf_counter() - start_s
