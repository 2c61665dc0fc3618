"""The library's products of a model's layer by number of tokens: where more tokens take less time.

    PYTHONPATH=src python benchmarks/kernels/library_products.py --json library_products.json

The idea: cuBLAS chooses a kernel by heuristics, which miss: at some numbers of tokens the product of a few tokens more
is faster. For each matrix and number of tokens this prints the time, and the best one among the next larger numbers.
Every product is captured in a graph, with weights of several layers in turn, so that none is in the cache.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from decode_step import Bench, median_device_ms
from torch.nn import functional as F

from gapless.bench.report import environment
from gapless.pipeline.graphs import CudaRecorder


def product_us(weights: list[torch.Tensor], tokens: int, repeats: int) -> float:
    """Median microseconds of a product of ``tokens`` rows."""
    x = torch.randn((tokens, weights[0].shape[1]), dtype=weights[0].dtype, device="cuda")

    def work() -> None:
        for weight in weights:
            F.linear(x, weight)

    work()
    graph = CudaRecorder().record(work)
    return median_device_ms(graph.replay, repeats=repeats) / len(weights) * 1e3


@torch.inference_mode()
def main() -> None:
    """Sweep numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--first", type=int, default=144)
    parser.add_argument("--last", type=int, default=2304)
    parser.add_argument("--step", type=int, default=16)
    parser.add_argument("--layers", type=int, default=8, help="whose weights take turns")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where every result is written")
    options = parser.parse_args()
    bench = Bench(options.preset, max_context=64)
    sizes = range(options.first, options.last + 1, options.step)
    results: list[dict[str, Any]] = []
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for name in ("qkv", "o", "gate_up", "down"):
            weights = [getattr(layer, name).weight for layer in bench.model.layers[: options.layers]]
            times = {size: product_us(weights, size, options.repeats) for size in sizes}
            results.append({"matrix": name, "shape": list(weights[0].shape), "us": times})
            print(name, " ".join(f"{size}:{us:.1f}" for size, us in times.items()), flush=True)
    total = {size: sum(each["us"][size] for each in results) for size in sizes}
    best = {size: min((s for s in sizes if s >= size), key=lambda s: total[s]) for size in sizes}
    print("layer", " ".join(f"{size}:{us:.1f}" for size, us in total.items()))
    print(
        "better with more:",
        {size: (into, round(total[size] / total[into], 3)) for size, into in best.items() if into != size},
    )
    if options.json:
        document = {"environment": environment(bench.device), "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
