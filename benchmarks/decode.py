"""Steady decode: N requests, one prompt length, many new tokens, EOS ignored; random weights.

Prints for each depth the seconds, the milliseconds of a step, the device-active share, and the share of the roofline:
the bytes every step must read (weights once, KV of every context) at this device's own read bandwidth, measured in the
same run, over the time it took. "Active" alone would hide slow kernels::

    python benchmarks/decode.py --preset llama-3.1-8b --requests 32 --prompt 256 --new-tokens 8192 --out decode.json
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from gpu_overlap import Collector, environment, run

from gapless.config import EngineConfig
from gapless.engine.assembly import BuiltEngine, build_engine
from gapless.engine.request import EngineRequest
from gapless.sampling_params import SamplingParams


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of the best plain read: the sum of 4 GiB (256 MiB on a CPU)."""
    data = torch.ones(1 << (30 if device.type == "cuda" else 26), dtype=torch.float32, device=device)
    times = []
    for _ in range(10):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            data.sum()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            data.sum()
            times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


def requests_of(built: BuiltEngine, count: int, prompt: int, new_tokens: int) -> list[EngineRequest]:
    """Prompts that share no prefix."""
    vocab_size = built.loaded.spec.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    return [
        EngineRequest(
            prompt_token_ids=[(i * 7919 + index * 104_729 + 1) % vocab_size for i in range(prompt)], params=params
        )
        for index in range(count)
    ]


def measure(args: argparse.Namespace, depth: int) -> dict[str, Any]:
    """One engine at one depth: a short warm-up of the same shape, then the timed run."""
    collector = Collector()
    context = args.prompt + args.new_tokens
    config = EngineConfig(
        depth=depth,
        device=args.device,
        dtype=args.dtype,
        load_format="dummy",
        max_model_len=context,
        max_rows=max(args.requests, 1),
        num_blocks=args.requests * (-(-context // 16) + 1),
        enable_prefix_caching=False,
    )
    built = build_engine(args.preset, config, collector)
    try:
        run(built, collector, requests_of(built, args.requests, args.prompt, min(args.new_tokens, 32)))
        before = built.engine.counters()
        start = time.perf_counter()
        outputs = run(built, collector, requests_of(built, args.requests, args.prompt, args.new_tokens))
        seconds = time.perf_counter() - start
        after = built.engine.counters()
        model = built.loaded.model
        bytes_per_token = 2 * sum(
            built.loaded.spec.num_kv_heads * built.loaded.spec.head_dim * built.loaded.dtype.itemsize
            for _ in built.loaded.spec.windows
        )
        weight_bytes = model.weight_bytes
    finally:
        built.engine.shutdown()
    assert after.preemptions == 0
    steps = after.steps - before.steps
    mean_context = args.prompt + args.new_tokens / 2
    floor_s = steps * (weight_bytes + bytes_per_token * args.requests * mean_context) / read_bandwidth(model.device)
    tokens = sum(map(len, outputs))
    return {
        "depth": depth,
        "seconds": round(seconds, 3),
        "steps": steps,
        "ms_per_step": round(seconds / steps * 1e3, 4),
        "tokens_per_s": round(tokens / seconds, 1),
        "device_active": round(after.device.since(before.device).active_share or 0.0, 5),
        "roofline_s": round(floor_s, 3),
        "share_of_roofline": round(floor_s / seconds, 4),
        "outputs": outputs,
    }


def main() -> int:
    """Measure each depth; fail if their tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--depth", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = []
    for depth in args.depth:
        results.append(measure(args, depth))
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps({k: v for k, v in results[-1].items() if k != "outputs"}), flush=True)
    same = all(result["outputs"] == results[0]["outputs"] for result in results)
    print("tokens equal at all depths" if same else "FAILED: the depths differ", flush=True)
    if args.out:
        runs = [{k: v for k, v in result.items() if k != "outputs"} for result in results]
        workload = {k: v for k, v in vars(args).items() if k not in ("out", "depth")}
        found = {"environment": environment(args.device), "workload": workload, "same_tokens": same, "runs": runs}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
