"""From an engine's timeline to figures of one run: :func:`step_figures`, and the least a workload must read.

Used by the thread that measures, while no step is in flight.
"""

import itertools
import math

import numpy as np

from gapless.bench.figures import StepFigures, median_of
from gapless.bench.workloads import Workload
from gapless.timeline.idle import IdleTotals
from gapless.timeline.recorder import TimelineRecorder
from gapless.timeline.roofline import read_bytes, roofline_of
from gapless.timeline.spans import DeviceLimits, HostPhase, StepRecord

__all__ = ["least_bytes", "step_figures"]


def step_figures(recorder: TimelineRecorder, *, first_step: int, idle_before: IdleTotals) -> StepFigures:
    """What the timeline has about the steps from ``first_step`` on.

    Args:
        recorder: of the engine.
        first_step: the run's first one.
        idle_before: the recorder's totals when the run began.
    """
    recording = recorder.recording(first_step)
    steps, limits = recording.steps, recording.limits
    returns_s = [step.host[HostPhase.WAIT].end_s for step in steps]
    idle = recorder.totals().idle.since(idle_before)
    decode = roofline_of(recording)
    return StepFigures(
        periods_s=tuple(after - before for before, after in itertools.pairwise(returns_s)),
        host_s={phase.value: sum(step.host[phase].duration_s for step in steps) for phase in HostPhase},
        decode_host_s=median_of([_host_work_s(step) for step in steps if not step.num_prefill_tokens]),
        idle_s={cause.value: seconds for cause, seconds in idle.idle_s.items()},
        read_bytes=sum(read_bytes(step, limits) for step in steps),
        decode_steps=decode.decode_steps,
        decode_read_bytes=decode.read_bytes,
        decode_elapsed_s=decode.elapsed_s,
        num_steps=len(steps),
    )


def _host_work_s(step: StepRecord) -> float:
    return sum(span.duration_s for phase, span in step.host.items() if phase is not HostPhase.WAIT)


def least_bytes(workload: Workload, limits: DeviceLimits, *, max_rows: int) -> int:
    """What any engine must read to run a workload, however it schedules: a lower bound, in bytes.

    Weights once for each step, of which there are at least as many as the longest output has tokens, and the KV of a
    request's context once for each of its tokens but the first. What prefills compute and read is not counted.

    Args:
        workload: the requests.
        limits: of model and device.
        max_rows: most requests in a step.
    """
    new_tokens = [request.params.max_tokens or 0 for request in workload.requests]
    num_steps = max(max(new_tokens), math.ceil(sum(new_tokens) / max_rows))
    everywhere = limits.kv_bytes_per_token - limits.window_kv_bytes_per_token
    kv_bytes = 0
    for request, count in zip(workload.requests, new_tokens, strict=True):
        contexts = len(request.prompt_token_ids) + np.arange(1, count, dtype=np.int64)
        kv_bytes += everywhere * int(contexts.sum())
        if limits.window is not None:
            kv_bytes += limits.window_kv_bytes_per_token * int(np.minimum(contexts, limits.window).sum())
    return num_steps * limits.weight_bytes + kv_bytes
