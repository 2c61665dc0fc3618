"""Depth 1, 2 and 3 on one GPU, with CUDA graphs and without: the same steps, the same tokens, and how much of the time
the device computes.

For each preset (random weights, bf16): 64 requests of mixed prompt and output length, all submitted at once, EOS
ignored, no shared prefix, no preemption. Every engine must run steps of the same shapes and give the same ids, with
torch's sync-debug mode set to ``error`` so that a hidden host sync anywhere in a submit fails the run. An engine first
runs the workload until it compiles and captures nothing more; then the same workload is timed. ``submit`` is the time
that the engine's thread spends in ``Ring.submit``, the median over the steps. Results go to ``--out``::

    python benchmarks/gpu_overlap.py --preset smollm2-135m llama-3.1-8b --out results.json
"""

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gapless.bench.report import environment as bench_environment
from gapless.config import EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.request import EngineRequest
from gapless.engine.results import RequestUpdate
from gapless.errors import EngineDeadError
from gapless.pipeline.batch import ScheduledBatch
from gapless.pipeline.graphs import CudaRecorder, GraphedStep
from gapless.pipeline.ring import Ring
from gapless.sampling_params import SamplingParams


@dataclass
class Collector:
    """Waits for the ends of the requests of one run."""

    wanted: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)
    error: EngineDeadError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def expect(self, count: int) -> None:
        """Start a run of ``count`` requests."""
        self.wanted = count
        self.outputs = {}
        self.done.clear()

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Keep what ended."""
        for update in updates:
            if update.finish_reason is not None:
                assert update.finish_reason == "length", update
                self.outputs[update.request_id] = update.token_ids
        if len(self.outputs) == self.wanted:
            self.done.set()

    def engine_died(self, error: EngineDeadError) -> None:
        """Stop waiting."""
        self.error = error
        self.done.set()


def workload(vocab_size: int, scale: float, *, sampled: bool) -> list[EngineRequest]:
    """64 requests of mixed length; every prompt starts differently, so that nothing is shared."""
    draw = random.Random(1)
    requests = []
    for index in range(64):
        prompt = [index] + [draw.randrange(vocab_size) for _ in range(draw.randint(1, int(700 * scale)))]
        params = SamplingParams(
            temperature=0.8 if sampled and index % 2 else 0.0,
            top_p=0.9 if sampled and index % 4 == 1 else 1.0,
            seed=index,
            max_tokens=draw.randint(1, int(256 * scale)),
        )
        requests.append(EngineRequest(prompt_token_ids=prompt, params=params))
    return requests


def run(built: BuiltEngine, collector: Collector, requests: list[EngineRequest]) -> list[list[int]]:
    """Run requests to their ends; the outputs in the order of the requests."""
    collector.expect(len(requests))
    ids = built.engine.submit(requests, lambda ids: None)
    collector.done.wait()
    if collector.error is not None:
        raise collector.error
    return [collector.outputs[request_id] for request_id in ids]


@contextmanager
def times_ms(owner: type, method: str) -> Iterator[list[float]]:
    """How long each call of a method in the block keeps its thread."""
    times: list[float] = []
    original = getattr(owner, method)

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        result = original(*args)
        times.append((time.perf_counter() - start) * 1e3)
        return result

    setattr(owner, method, timed)
    try:
        yield times
    finally:
        setattr(owner, method, original)


def num_captured(built: BuiltEngine) -> int:
    """How many pairs of graphs there are."""
    return built.executor.counts.captured if isinstance(built.executor, GraphedStep) else 0


def pool_bytes(built: BuiltEngine) -> int:
    """Memory of the graphs' pool."""
    executor = built.executor
    if isinstance(executor, GraphedStep) and isinstance(executor.recorder, CudaRecorder):
        return executor.recorder.pool_bytes
    return 0


def driver_bytes(device: str) -> int:
    """Memory of the GPU that is taken and not torch's: kernels, libraries, graphs (and other processes)."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def warm_up(built: BuiltEngine, collector: Collector, requests: list[EngineRequest]) -> None:
    """Run the workload until a run captures no graph (a bucket meets the sets of buffers in turn)."""
    captured = -1
    while captured != num_captured(built):
        captured = num_captured(built)
        run(built, collector, requests)


def measure(preset: str, depth: int, device: str, scale: float, *, sampled: bool, cuda_graphs: bool) -> dict[str, Any]:
    """One engine: warm up, then the timed run."""
    shapes: list[tuple[int, int, int]] = []

    def note(batch: ScheduledBatch) -> None:
        shapes.append((len(batch.input_ids), len(batch.rows), len(batch.sample_rows)))

    collector = Collector()
    config = EngineConfig(
        depth=depth,
        device="cuda" if device == "cuda" else "cpu",
        load_format="dummy",
        max_model_len=2048,
        num_blocks=8192 if device == "cuda" else 2048,
        enable_prefix_caching=False,
        cuda_graphs=cuda_graphs,
    )
    built = build_engine(preset, config, collector, on_submit=note)
    try:
        requests = workload(built.loaded.spec.vocab_size, scale, sampled=sampled)
        first, outside = num_captured(built), driver_bytes(device)
        with times_ms(CudaRecorder, "record") as records_ms:
            warm_up(built, collector, requests)
        captured = num_captured(built)
        outside = driver_bytes(device) - outside
        shapes.clear()
        before = built.engine.counters()
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        with times_ms(Ring, "submit") as submits_ms:
            start = time.perf_counter()
            outputs = run(built, collector, requests)
            seconds = time.perf_counter() - start
        assert num_captured(built) == captured
        pool = pool_bytes(built)
        after = built.engine.counters()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        built.engine.shutdown()
    assert after.preemptions == 0
    activity = after.device.since(before.device)
    return {
        "preset": preset,
        "depth": depth,
        "cuda_graphs": cuda_graphs,
        "seconds": seconds,
        "steps": len(shapes),
        "output_tokens": sum(map(len, outputs)),
        "tokens_per_s": sum(map(len, outputs)) / seconds,
        "ms_per_step": seconds / len(shapes) * 1e3,
        "device_active": activity.active_share,
        "device_ms_per_step": activity.busy_s / len(shapes) * 1e3,
        "submit_ms": statistics.median(submits_ms),
        "submit_mean_ms": statistics.mean(submits_ms),
        "graph_pairs": captured,
        "graph_pool_bytes": pool,
        # The first engine of a process loads kernels and libraries here as well.
        "driver_bytes_a_pair": outside / (captured - first) if captured > first else 0,
        "capture_ms_a_pair": sum(records_ms) / max(captured - first, 1),
        "start_s": built.start_s,
        "shapes": shapes,
        "outputs": outputs,
    }


def compare(
    preset: str, depths: list[int], device: str, scale: float, *, sampled: bool, graphs: list[str]
) -> list[dict[str, Any]]:
    """All depths of one preset, with and without graphs; says so if shapes or tokens differ."""
    results = []
    for depth, choice in ((depth, choice) for choice in graphs for depth in depths):
        result = measure(preset, depth, device, scale, sampled=sampled, cuda_graphs=choice == "on")
        if device == "cuda":
            torch.cuda.empty_cache()
        results.append(result)
        print(
            f"{preset} depth {depth} graphs {choice}: {result['steps']} steps, {result['ms_per_step']:.2f} ms a step "
            f"(device {result['device_ms_per_step']:.2f}, submit {result['submit_ms']:.2f}), "
            f"{result['tokens_per_s']:.0f} tokens/s, device active {result['device_active']:.4f}, "
            f"{result['graph_pairs']} pairs of graphs in {result['graph_pool_bytes'] / 2**20:.0f} MiB, "
            f"{result['capture_ms_a_pair']:.1f} ms and {result['driver_bytes_a_pair'] / 2**20:.1f} MiB a pair, "
            f"started in {result['start_s']:.1f} s",
            flush=True,
        )
    first = results[0]
    for result in results:
        result["same_shapes"] = result["shapes"] == first["shapes"]
        result["same_tokens"] = result["outputs"] == first["outputs"]
        result["sampled"] = sampled
    if not all(result["same_shapes"] and result["same_tokens"] for result in results):
        print(f"FAILED: {preset}: the runs differ", flush=True)
    return [{k: v for k, v in result.items() if k not in ("shapes", "outputs")} for result in results]


def environment(device: str) -> dict[str, Any]:
    """Versions, hardware, command, date and commit."""
    return bench_environment(torch.device(device))


def main() -> int:
    """Compare the depths of each preset and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", nargs="+", default=["smollm2-135m", "llama-3.1-8b"])
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--cuda-graphs", nargs="+", choices=["on", "off"], default=["on", "off"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and output lengths")
    parser.add_argument("--sampled", action="store_true", help="half of the requests are sampled with seeds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for preset in args.preset:
        results += compare(preset, args.depth, args.device, args.scale, sampled=args.sampled, graphs=args.cuda_graphs)
    if args.out:
        args.out.write_text(json.dumps({"environment": environment(args.device), "runs": results}, indent=1) + "\n")
    return 0 if all(result["same_shapes"] and result["same_tokens"] for result in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
