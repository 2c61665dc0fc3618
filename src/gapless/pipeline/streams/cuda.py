"""CUDA streams and events. Work is launched from the host thread under the stream's context.

PyTorch's pool streams are non-blocking: nothing but events orders them, not even the default stream.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gapless.pipeline.streams.protocol import Event, Stream

__all__ = ["CudaEvent", "CudaQueues", "CudaStream"]


class CudaEvent:
    """A timing event of CUDA."""

    def __init__(self) -> None:
        self.raw = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Block until the latest record is reached; the interpreter lock is released meanwhile."""
        self.raw.synchronize()


class CudaStream:
    """A non-default CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self.raw = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], None]) -> None:
        """Launch ``work`` on this stream."""
        with torch.inference_mode(), torch.cuda.stream(self.raw):
            work()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue an asynchronous copy; the host side is pinned, so the host does not wait."""
        with torch.inference_mode(), torch.cuda.stream(self.raw):
            target.copy_(source, non_blocking=True)

    def record(self, event: Event) -> None:
        """Mark the end of what is enqueued."""
        assert isinstance(event, CudaEvent)
        event.raw.record(self.raw)

    def wait(self, event: Event) -> None:
        """Order later work behind the event."""
        assert isinstance(event, CudaEvent)
        self.raw.wait_event(event.raw)


class CudaQueues:
    """Streams of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self, name: str) -> Stream:
        """Make a stream; the name is for readers of the code only."""
        return CudaStream(self.device)

    def event(self) -> Event:
        """Make a timing event."""
        return CudaEvent()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Pinned host memory: a pageable copy would block the host (hazard: hidden syncs)."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Device seconds between two events that have been reached."""
        assert isinstance(start, CudaEvent)
        assert isinstance(end, CudaEvent)
        return float(start.raw.elapsed_time(end.raw)) / 1e3

    def host_time_s(self, event: Event) -> float | None:
        """A GPU's clock is its own: ``None``."""
        return None

    def close(self) -> None:
        """Wait for everything enqueued, so that memory can be freed safely."""
        torch.cuda.synchronize(self.device)
