"""Steps as graphs: :class:`GraphedStep` replays what :class:`DeviceStep` would launch kernel by kernel.

The idea: launching the few hundred kernels of a step of few tokens takes the host longer than the device needs to run
them, so the overlap alone cannot keep the device busy. A graph replays them with one call. It is bound to addresses and
shapes, so there are graphs for each set of step buffers and each *bucket*, a size that steps are padded to (see
``padding``): a pair for a decode step (forward with carry-over; greedy sampling), and one for a mixed step, of all that
comes before the head. What a graph reads is either in the fixed part of the packed input, whose layout depends on the
bucket alone, or device state that never moves, weights included. The rest is launched: the tail (table changes, new
rows) before the replay, and after it whatever a decode step draws or masks, and a mixed step's head and samples, of
which there may be any number.

What a graph must not depend on: lengths. They are constants of the Python code that is captured, so the model is told
none, in a decode step of no context and in a mixed step of no entry at all, and an attention backend that asks for one
fails at once, instead of being right at one length and wrong at another.

All graphs draw their intermediates from one memory pool, since two steps never compute at once; nothing in it outlives
a replay. Logits and hidden states go to one static tensor each for all, outputs to the step buffers.

Graphs are captured the first time a bucket and buffers meet. That step is launched as usual first, which compiles and
loads its kernels, and captured right after, while the device works on it: nothing waits. Used on the compute stream
only, by the thread that runs it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gapless.garbage import without_garbage_collection
from gapless.layers.forward_inputs import StepBounds
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.layout import StepLayout, StepSizes, layout_of
from gapless.pipeline.padding import StepBuckets
from gapless.pipeline.step_buffers import StepBuffers

__all__ = ["SMALL_TENSORS_BYTES", "CudaRecorder", "GraphCounts", "GraphedStep", "Recorder", "Recording"]

# PyTorch's allocator keeps tensors of up to 1 MiB apart from larger ones, in segments of 2 MiB.
_SMALL_TENSOR_BYTES = 1 << 20
_NUM_SMALL_TENSORS = 8
SMALL_TENSORS_BYTES = _NUM_SMALL_TENSORS * _SMALL_TENSOR_BYTES


class Recording(Protocol):
    """Device work that can be run again."""

    def replay(self) -> None:
        """Enqueue the work on the current stream."""


class Recorder(Protocol):
    """Makes recordings. On CUDA they are graphs; without a device, tests keep the closure and run it again."""

    def record(self, work: Callable[[], None]) -> Recording:
        """Record what ``work`` enqueues on the current stream; whether it also runs now is left open."""


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool.

    Args:
        pool_bytes: how large the pool is made before the first capture, more than ``SMALL_TENSORS_BYTES``; 0 lets it
            grow with what graphs ask for. It would then be pieces of many sizes, which fit the next graph's tensors
            badly, and how many there are would hang on the order of captures.
    """

    def __init__(self, pool_bytes: int = 0) -> None:
        assert pool_bytes == 0 or pool_bytes > SMALL_TENSORS_BYTES, pool_bytes
        self._pool = torch.cuda.graph_pool_handle()
        self._reserve_bytes = pool_bytes
        self._reserve: Recording | None = None

    @property
    def pool_bytes(self) -> int:
        """Device memory of the pool. Walks the allocator's segments: for reports and tests."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(segment["total_size"] for segment in segments if segment["segment_pool_id"] == tuple(self._pool))

    def record(self, work: Callable[[], None]) -> Recording:
        """Capture ``work`` without running it.

        ``torch.cuda.graph`` is not used, because it synchronises the device and empties the allocator's cache, in the
        middle of traffic. ``thread_local``: a call of ours that may not be captured is an error, while other threads of
        the process (the user's own, another engine) go on allocating memory and waiting for events meanwhile. Garbage
        is not collected meanwhile: in it may be the graphs of an earlier engine, and to destroy one is such a call.
        """
        if self._reserve is None and self._reserve_bytes:
            # On the stream of the graphs, whose memory it is. The pool lives as long as a graph of it.
            self._reserve = self._capture(lambda: _allocate(self._reserve_bytes))
        return self._capture(work)

    def _capture(self, work: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with without_garbage_collection():
            # The random generator's own tensors are made here; as inference tensors they would fail a later capture of
            # the user's outside of inference mode.
            with torch.inference_mode(mode=False):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph


def _allocate(num_bytes: int) -> None:
    """Take memory from the driver and leave it to the allocator: one piece, and pieces for small tensors."""
    small = [torch.empty(_SMALL_TENSOR_BYTES, dtype=torch.uint8, device="cuda") for _ in range(_NUM_SMALL_TENSORS)]
    piece = torch.empty(num_bytes - SMALL_TENSORS_BYTES, dtype=torch.uint8, device="cuda")
    piece[:1].zero_()  # a graph of nothing at all would be warned about
    del small


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCounts:
    """How often graphs were used.

    Attributes:
        captured: buckets that have graphs, counted for each set of buffers.
        captured_mixed: those of mixed steps among them.
        replayed: steps.
    """

    captured: int
    captured_mixed: int
    replayed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepGraphs:
    """A decode bucket's graphs over one set of buffers; forward leaves ``logits: [bucket, vocab_size]``."""

    forward: Recording
    sample: Recording
    logits: Tensor


class GraphedStep:
    """A ``StepExecutor`` that replays steps of few tokens and hands all others to a :class:`DeviceStep`.

    Args:
        step: does the work that is recorded, and the steps that are not.
        recorder: makes the graphs.
        buckets: sizes that steps are padded to; a decode step of another size is not recorded, and of mixed steps only
            those that were padded as such are.
    """

    def __init__(self, step: DeviceStep, recorder: Recorder, buckets: StepBuckets) -> None:
        self._step = step
        self.recorder = recorder
        self._buckets = buckets
        self._sizes = frozenset(buckets.decode)
        self._graphs: dict[tuple[StepBuffers, int], _StepGraphs] = {}
        self._mixed: dict[tuple[StepBuffers, int], Recording] = {}
        self._logits: Tensor | None = None
        self._hidden: Tensor | None = None
        self._replayed = 0

    @property
    def counts(self) -> GraphCounts:
        """What was captured and replayed so far."""
        mixed = len(self._mixed)
        return GraphCounts(captured=len(self._graphs) + mixed, captured_mixed=mixed, replayed=self._replayed)

    def forward(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        """See :meth:`StepExecutor.forward`; the logits of a replayed step are overwritten by the next one."""
        if batch.bounds is not None:
            return self._forward_mixed(batch, layout, buffers)
        graphs = self._find(batch, buffers)
        if graphs is None:
            return self._step.forward(batch, layout, buffers)
        self._step.apply_changes(batch, layout, buffers)
        graphs.forward.replay()
        self._replayed += 1
        buffers.launch = "graph"
        return graphs.logits

    def sample(self, logits: Tensor, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> None:
        """See :meth:`StepExecutor.sample`."""
        graphs = self._find(batch, buffers)
        if graphs is not None and batch.samples_plainly and not self._step.has_logits_processor:
            assert logits is graphs.logits, "the sampling graph reads what the forward graph wrote"
            graphs.sample.replay()
            return
        self._step.sample(logits, batch, layout, buffers)
        if graphs is None and self._can_record(batch):
            self._graphs[buffers, len(batch.rows)] = self._record(len(batch.rows), logits, buffers)
            buffers.launch = "capture"
        elif batch.bounds is not None and (buffers, len(batch.input_ids)) not in self._mixed:
            self._mixed[buffers, len(batch.input_ids)] = self._record_mixed(batch, batch.bounds, buffers)
            buffers.launch = "capture"

    def _forward_mixed(self, batch: ScheduledBatch, layout: StepLayout, buffers: StepBuffers) -> Tensor:
        """Hidden states by a graph if there is one; the head and what it rates by ordinary launches."""
        size = len(batch.input_ids)
        self._step.apply_changes(batch, layout, buffers)
        recording = self._mixed.get((buffers, size))
        if recording is None:
            buffers.launch = "kernels"
            hidden = self._step.compute_hidden(layout, buffers, bounds=batch.bounds)
            if self._hidden is None:
                self._hidden = hidden.new_empty((max(self._buckets.mixed), *hidden.shape[1:]))
        else:
            assert self._hidden is not None
            recording.replay()
            hidden = self._hidden[:size]
            self._replayed += 1
            buffers.launch = "graph"
        return self._step.logits_of(hidden, batch, layout, buffers)

    def _find(self, batch: ScheduledBatch, buffers: StepBuffers) -> _StepGraphs | None:
        return self._graphs.get((buffers, len(batch.rows))) if self._can_record(batch) else None

    def _can_record(self, batch: ScheduledBatch) -> bool:
        """Whether it is a decode step: every entry has one token and samples, their number is a bucket."""
        size = len(batch.rows)
        if batch.bounds is not None or batch.rates_prompts:
            return False
        return len(batch.input_ids) == len(batch.sample_rows) == size and size in self._sizes

    def _record(self, size: int, like: Tensor, buffers: StepBuffers) -> _StepGraphs:
        """Record the bucket ``size`` over ``buffers``; ``like`` is a step's logits."""
        if self._logits is None:
            self._logits = torch.empty((max(self._sizes), like.shape[1]), dtype=like.dtype, device=like.device)
        logits = self._logits[:size]
        # Without a tail: offsets in the fixed part are the same whatever the tail holds.
        layout = layout_of(StepSizes(size, size, size, random=0, changes=0, inits=0, masked=0))
        query_lens = (1,) * size

        def forward() -> None:
            logits.copy_(self._step.compute_logits(layout, buffers, query_lens=query_lens, seq_lens=()))

        def sample() -> None:
            self._step.choose_tokens(logits, layout, buffers, needs_filter=False)

        return _StepGraphs(forward=self.recorder.record(forward), sample=self.recorder.record(sample), logits=logits)

    def _record_mixed(self, batch: ScheduledBatch, bounds: StepBounds, buffers: StepBuffers) -> Recording:
        """Record all that comes before the head of a mixed step."""
        size = len(batch.input_ids)
        layout = layout_of(StepSizes(size, len(batch.rows), 0, random=0, changes=0, inits=0, masked=0))
        assert self._hidden is not None, "the step that is recorded was launched before"
        hidden = self._hidden[:size]

        def forward() -> None:
            hidden.copy_(self._step.compute_hidden(layout, buffers, bounds=bounds))

        return self.recorder.record(forward)
