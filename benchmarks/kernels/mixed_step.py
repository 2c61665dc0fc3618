"""A prompt beside decodes, launched kernel by kernel and as a graph: what it costs the host and the device.

    PYTHONPATH=src python benchmarks/kernels/mixed_step.py --json mixed_step.json

The idea: the host hides behind the device if it enqueues a step faster than the device runs the one before, which in
steady traffic is a decode step. So each step is run three ways: as it is, launched; as it is, in a graph made for this
measurement, which tells the device's time without the host; and as the engine runs it, padded to a bucket and replayed.
Its neighbours are decode steps, so the time of one of those is the first line. Host times are of single steps that find
an idle device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_step import Bench, kernel_times, median_device_ms

from gapless.bench.report import environment
from gapless.config import EngineConfig
from gapless.engine.step_buckets import step_buckets
from gapless.pipeline.batch import BatchBuilder, BatchEntry, ScheduledBatch
from gapless.pipeline.device_step import StepExecutor
from gapless.pipeline.graphs import CudaRecorder, GraphedStep

PROMPTS = (0, 5, 16, 40, 70, 97, 129, 200, 256, 300, 353, 417, 481)


def mixed_batch(prompt: int, decodes: int, context: int) -> ScheduledBatch:
    """One more token for each of some contexts, and a prompt on the row behind them."""
    builder = BatchBuilder(0)
    for row in range(decodes):
        builder.add_token(BatchEntry(row, 0, row, context - 1, 1, True, True, True, 1), 0)
    if prompt:
        ids = np.arange(1, prompt + 1, dtype=np.int32)
        builder.add_chunk(BatchEntry(decodes, 0, decodes, 0, prompt, True, True, False, 0), ids)
    return builder.build()


def host_ms(once: Callable[[], object], repeats: int) -> float:
    """Median time in which work is enqueued."""
    spans = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        once()
        spans.append((time.perf_counter() - begun) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(spans)


class MixedBench:
    """The device's side of steps over one cache."""

    def __init__(self, bench: Bench, *, rows: int, decodes: int, context: int) -> None:
        config = EngineConfig(max_rows=rows).for_device("cuda")
        self.step, self.buffers = bench.make_step(config, contexts=decodes + 1, context=context, max_tokens=2048)
        buckets = step_buckets(config, bench.model)
        assert buckets is not None
        self.buckets = buckets
        self.graphed = GraphedStep(self.step, CudaRecorder(), buckets)

    def once(self, batch: ScheduledBatch, executor: StepExecutor) -> Callable[[], None]:
        """The step, with its input in place."""
        layout = self.buffers.write(batch)
        self.buffers.device_in.copy_(self.buffers.host_in)

        def run() -> None:
            executor.sample(executor.forward(batch, layout, self.buffers), batch, layout, self.buffers)

        return run

    def measure(self, batch: ScheduledBatch, *, repeats: int, profile: bool) -> dict[str, Any]:
        """Its times as it is, and as the engine runs it."""
        found: dict[str, Any] = {"tokens": len(batch.input_ids)}
        exact = self.once(batch, self.step)
        exact()
        found["launched_host_ms"] = host_ms(exact, repeats)
        graph = CudaRecorder().record(exact)
        found["exact_device_ms"] = median_device_ms(graph.replay, repeats=repeats)
        if profile:
            found["exact_kernels"] = kernel_times(graph.replay)
        padded = self.buckets.pad(batch)
        replayed = self.once(padded, self.graphed)
        replayed()
        replayed()
        found["bucket_tokens"] = len(padded.input_ids)
        found["launch"] = self.buffers.launch
        found["bucket_host_ms"] = host_ms(replayed, repeats)
        found["bucket_device_ms"] = median_device_ms(replayed, repeats=repeats)
        if profile:
            found["kernels"] = kernel_times(replayed)
        return found


@torch.inference_mode()
def main() -> None:
    """Time a step for each length of the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--prompts", type=int, nargs="+", default=list(PROMPTS), help="0 is a decode step")
    parser.add_argument("--decodes", type=int, default=31)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=256, help="of the engine; mixed steps have as many entries")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="list the kernels")
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    bench = Bench(options.preset, max_context=max(options.context, 2048))
    results = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        mixed = MixedBench(bench, rows=options.rows, decodes=options.decodes, context=options.context)
        for prompt in options.prompts:
            batch = mixed_batch(prompt, options.decodes, options.context)
            found = {"prompt": prompt, **mixed.measure(batch, repeats=options.repeats, profile=options.profile)}
            results.append(found)
            print(json.dumps({k: v for k, v in found.items() if "kernels" not in k}), flush=True)
            for row in found.get("kernels", [])[:10]:
                print("   {step_us:10.1f} us  {per_step:6.1f} x {median_us:8.2f}  {kernel:.60}".format(**row))
    if options.json:
        document = {"environment": environment(bench.device), "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
