"""Device queues that watch how they are used: :class:`AuditedQueues` around a simulator or worker threads.

They check that an input buffer never changes between the enqueueing of its copy and the host's wait for the step, and
know which stream's work is running, so that device state can be checked to change on the compute stream only.
"""

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from gapless.pipeline.streams.protocol import Event, Queues, Stream
from gapless.sampling.sampler import RowParams, Sampled, SampleInputs, Sampler
from gapless.sampling.wide_state import WideInits, WideState
from simulation.audit import check

__all__ = ["AuditedQueues", "AuditedSampler"]


class AuditedQueues:
    """Wraps ``inner``; the host's calls come from one thread."""

    def __init__(self, inner: Queues) -> None:
        self.device = inner.device
        self._inner = inner
        self._running = threading.local()
        self._copies: deque[tuple[Tensor, bytes]] = deque()
        self._state: list[Tensor] = []
        self._latest: list[bytes] = []

    def watch(self, state: list[Tensor]) -> None:
        """Device state that only the compute stream may change."""
        self._state = state
        self._latest = [tensor.numpy().tobytes() for tensor in state]

    def stream(self, name: str) -> Stream:
        """Make a watched stream."""
        return _AuditedStream(self, self._inner.stream(name), name)

    def event(self) -> Event:
        """Make a watched event."""
        return _AuditedEvent(self, self._inner.event())

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Make host memory."""
        return self._inner.host_buffer(num_bytes)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two records."""
        return self._inner.elapsed_s(_inner_event(start), _inner_event(end))

    def close(self) -> None:
        """Stop workers."""
        self._inner.close()

    def check_on_compute(self, what: str) -> None:
        """Raise unless the caller runs on the compute stream."""
        name = getattr(self._running, "name", "another stream")
        check(name == "compute", f"{what} was touched by {name}")

    def check_inputs(self) -> None:
        """Raise if an input buffer of a step in flight has changed."""
        for source, before in self._copies:
            check(source.numpy().tobytes() == before, "an input buffer changed while its step was in flight")

    def input_copied(self, source: Tensor) -> None:
        """The copy of an input buffer is being enqueued."""
        self.check_inputs()
        self._copies.append((source, source.numpy().tobytes()))

    def step_returned(self) -> None:
        """The host has waited for the oldest step."""
        self.check_inputs()
        self._copies.popleft()

    def run(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` of the stream ``name``."""
        if name != "compute":
            work()
            return
        for tensor, before in zip(self._state, self._latest, strict=True):
            check(tensor.numpy().tobytes() == before, "device state changed outside the compute stream")
        self._running.name = name
        try:
            work()
        finally:
            self._running.name = "another stream"
        self._latest = [tensor.numpy().tobytes() for tensor in self._state]


class _AuditedStream:
    def __init__(self, queues: AuditedQueues, inner: Stream, name: str) -> None:
        self._queues = queues
        self._inner = inner
        self._name = name

    def submit(self, work: Callable[[], None]) -> None:
        self._inner.submit(lambda: self._queues.run(self._name, work))

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._name == "h2d":
            self._queues.input_copied(source)
        self._inner.copy(target, source)

    def record(self, event: Event) -> None:
        self._inner.record(_inner_event(event))

    def wait(self, event: Event) -> None:
        self._inner.wait(_inner_event(event))


class _AuditedEvent:
    def __init__(self, queues: AuditedQueues, inner: Event) -> None:
        self._queues = queues
        self.inner = inner

    def synchronize(self) -> None:
        self.inner.synchronize()
        self._queues.step_returned()


class AuditedSampler(Sampler):
    """A sampler that refuses to work anywhere but on the compute stream."""

    def __init__(self, *, max_rows: int, queues: AuditedQueues, wide: WideState | None = None) -> None:
        super().__init__(max_rows=max_rows, device=torch.device("cpu"), wide=wide)
        self._queues = queues

    def set_rows(self, params: RowParams) -> None:
        """Give rows to new requests."""
        self._queues.check_on_compute("the sampler's rows")
        super().set_rows(params)

    def set_wide_rows(self, inits: WideInits) -> None:
        """Give wide rows to new requests."""
        self._queues.check_on_compute("the sampler's wide rows")
        super().set_wide_rows(inits)

    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        """Choose tokens."""
        self._queues.check_on_compute("the sampler")
        return super().sample(logits, inputs)


def _inner_event(event: Event) -> Event:
    assert isinstance(event, _AuditedEvent)
    return event.inner
