"""One decode step of a whole model, as the engine runs it: its time, its share of the floor, and its kernels.

    PYTHONPATH=src python benchmarks/kernels/decode_step.py --requests 32 --context 4352 --profile

The idea: the step's batch names contexts of the wanted length over blocks that hold zeros, so that no prompt has to be
computed first; the device's work is that of a real step, replayed from the same graphs. The floor is the bytes that the
step must read, weights and K and V, at the read bandwidth measured in the same run. ``--profile`` lists the kernels.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gapless.bench.report import environment
from gapless.config import EngineConfig
from gapless.engine.device_kernels import device_kernels
from gapless.engine.step_assembly import make_device_step
from gapless.model.kv_cache import KVCache
from gapless.model.loading import load_model
from gapless.model.runner import ModelRunner
from gapless.model.spec import kv_shape
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.device_step import DeviceStep
from gapless.pipeline.graphs import CudaRecorder, GraphedStep
from gapless.pipeline.padding import StepBuckets, idle_decode_batch
from gapless.pipeline.step_buffers import BufferLimits, StepBuffers
from gapless.pipeline.streams.cuda import CudaQueues
from gapless.timeline.roofline import measure_read_bandwidth

BLOCK_SIZE = 16


class Bench:
    """A model on the device, and steps of any shape over a cache of zeros."""

    def __init__(self, preset: str, *, max_context: int) -> None:
        self.device = torch.device("cuda", 0)
        kernels = device_kernels(self.device)
        loaded = load_model(
            preset,
            load_format="dummy",
            device=self.device,
            max_model_len=max_context,
            attention=kernels.attention,
            ops=kernels.ops,
        )
        self.model, self.spec, self.dtype = loaded.model, loaded.spec, loaded.dtype
        self.shape = kv_shape(self.spec, self.dtype)
        self.kernels = kernels

    def fits(self, requests: int, context: int) -> bool:
        """Whether the contexts' K and V fit beside the weights."""
        needed = requests * -(-context // BLOCK_SIZE) * BLOCK_SIZE * self.shape.bytes_per_token
        return needed < torch.cuda.mem_get_info()[0] - (6 << 30)

    def floor_s(self, requests: int, context: int, bytes_per_s: float) -> float:
        """The time in which the step's bytes can be read."""
        return (self.model.weight_bytes + requests * context * self.shape.bytes_per_token) / bytes_per_s

    def make_step(
        self, config: EngineConfig, *, contexts: int, context: int, max_tokens: int
    ) -> tuple[DeviceStep, StepBuffers]:
        """A step's device side over so many contexts, on the first rows, whose blocks lie in disorder; its buffers."""
        blocks = -(-context // BLOCK_SIZE)
        kv = KVCache(self.shape, num_blocks=contexts * blocks, block_size=BLOCK_SIZE, device=self.device)
        limits = BufferLimits(max_tokens=max_tokens, max_rows=config.max_rows, max_changes=1, max_masked=0)
        runner = ModelRunner(self.model, kv)
        step = make_device_step(config, runner, limits, self.kernels, max_blocks=blocks, processor=None)
        order = 1 + torch.randperm(contexts * blocks, device=self.device, dtype=torch.int32)
        step.block_tables[:contexts] = order.view(contexts, blocks)
        return step, StepBuffers(CudaQueues(self.device), limits)

    @torch.inference_mode()
    def run(self, requests: int, context: int, *, repeats: int, profile: bool) -> dict[str, Any]:
        """Time one shape."""
        config = EngineConfig(max_rows=requests)
        step, buffers = self.make_step(config, contexts=requests, context=context, max_tokens=requests)
        executor = GraphedStep(step, CudaRecorder(), StepBuckets(num_rows=requests, decode=(requests,)))
        batch = decode_batch(requests, context)
        layout = buffers.write(batch)
        buffers.device_in.copy_(buffers.host_in)

        def once() -> None:
            executor.sample(executor.forward(batch, layout, buffers), batch, layout, buffers)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ms = median_device_ms(once, repeats=repeats)
            found: dict[str, Any] = {"requests": requests, "context": context, "ms": ms}
            if profile:
                found["kernels"] = kernel_times(once)
        return found


def decode_batch(requests: int, context: int) -> ScheduledBatch:
    """A step in which ``requests`` requests of equal context sample greedily."""
    idle = idle_decode_batch(requests, reserved_row=requests)
    rows = np.arange(requests, dtype=np.int32)
    return replace(
        idle,
        positions=np.full(requests, context - 1, dtype=np.int32),
        seq_lens=np.full(requests, context, dtype=np.int32),
        carry=rows,
        token_rows=rows,
        rows=rows,
        sample_rows=rows,
    )


def median_device_ms(once: Callable[[], object], *, repeats: int) -> float:
    """Median time on the current stream of work that is enqueued faster than it runs; it runs four times before."""
    spans = []
    for _ in range(4 + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        once()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans[4:])


def kernel_times(once: Any, runs: int = 4) -> list[dict[str, Any]]:
    """Kernels of a step by name: how many, and microseconds of each and of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            once()
        torch.cuda.synchronize()
    spans = defaultdict[str, list[float]](list)
    events = sorted((e for e in profiler.events() if e.device_time > 0), key=lambda e: e.time_range.start)
    for event in events:
        spans[event.name].append(event.device_time)
    rows = [
        {
            "kernel": name[:110],
            "per_step": len(times) / runs,
            "median_us": round(statistics.median(times), 2),
            "step_us": round(sum(times) / runs, 1),
        }
        for name, times in spans.items()
    ]
    return sorted(rows, key=lambda row: -row["step_us"])


def main() -> None:
    """Time every shape asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, nargs="+", default=[32])
    parser.add_argument("--context", type=int, nargs="+", default=[4352])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    bytes_per_s = measure_read_bandwidth(torch.device("cuda", 0))
    bench = Bench(options.preset, max_context=max(options.context))
    results = []
    for context in options.context:
        for requests in options.requests:
            torch.cuda.empty_cache()
            if not bench.fits(requests, context):
                print(f"{requests} x {context}: does not fit")
                continue
            found = bench.run(requests, context, repeats=options.repeats, profile=options.profile)
            floor_ms = bench.floor_s(requests, context, bytes_per_s) * 1e3
            found |= {"floor_ms": floor_ms, "share_of_floor": floor_ms / found["ms"]}
            results.append(found)
            kernels = found.get("kernels", [])
            print(json.dumps({k: v for k, v in found.items() if k != "kernels"}), flush=True)
            for row in kernels:
                print("   {per_step:6.1f} x {median_us:8.2f} us = {step_us:9.1f} us  {kernel}".format(**row))
    if options.json:
        found = {"environment": environment(bench.device), "read_bytes_s": bytes_per_s, "results": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
