"""transformers' continuous batching on the common workload: what ``generate_batch`` runs, sync or async.

``generate_batch`` makes a manager, captures its graphs, runs and throws the manager away. Here the same manager serves
an untimed run first, so the timed one holds what a long-lived service would see.

Attention (``--attention``): ``flash`` takes the flash-attn package. ``stand-in`` puts the package of the same name in
``stand_in/`` in its place, whose decode kernel is gapless's own, so that transformers takes its fast decode path with a
good kernel where flash-attn cannot be built. ``sdpa`` is torch's attention, for which there is no fast decode path.
``auto`` is the first of them that works here. CUDA graphs are on, except that ``sdpa`` has the library's own choice.

Prints one JSON line, see ``workload.py``; progress goes to standard error::

    PYTHONPATH=src python benchmarks/peers/transformers_generate_batch.py --batching async --new-tokens 256 \
        --mean-context 4352
"""

import argparse
import importlib.util
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from workload import (
    WARM_UP_TOKENS,
    Mark,
    Workload,
    add_workload_arguments,
    heartbeat,
    median_step_ms,
    note,
    print_result,
    versions,
)

# The weights are random and the shape is known, so nobody needs the hub, which may not be reachable.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_STAND_IN = Path(__file__).parent / "stand_in"
_PAGE_SIZE = 256  # the library's default, and the size that flash-attn wants
# Prompt tokens of a step. Torch's attention is given a dense mask of them by all keys, which is copied in every step.
_STEP_TOKENS = {"flash": 8192, "stand-in": 8192, "sdpa": 256}


def chosen_attention(wanted: str, device: str) -> str:
    """Resolve ``auto``, and make the stand-in importable. Comes before the first import of transformers."""
    if wanted == "auto":
        if device != "cuda":
            wanted = "sdpa"
        else:
            wanted = "flash" if importlib.util.find_spec("flash_attn") else "stand-in"
    if wanted == "stand-in":
        assert "transformers" not in sys.modules, "transformers looks for flash-attn when it is imported"
        sys.path.insert(0, str(_STAND_IN))
    return wanted


def load(workload: Workload, attention: str, *, paged_names: bool) -> Any:
    """The model with random weights, made on its device; ``paged_names``: attention is called ``paged|...``."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gapless.model.checkpoint.presets import PRESETS

    name = "sdpa" if attention == "sdpa" else "flash_attention_2"
    torch.manual_seed(0)
    with torch.device(workload.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**PRESETS[workload.preset]),
            attn_implementation=f"paged|{name}" if paged_names else name,
            dtype=getattr(torch, workload.dtype),
        )
    return model.eval()


def batching_options(workload: Workload, attention: str, batching: str, known: set[str]) -> dict[str, Any]:
    """Fields of the library's ``ContinuousBatchingConfig``; ``known`` are those that this version has."""
    pages = -(-workload.context // _PAGE_SIZE) + 1
    step_tokens = max(_STEP_TOKENS[attention], workload.requests)
    options = {
        # What the workload needs and a quarter more, as it takes nearly all memory when left alone; and two of the
        # largest steps, for its warm-up.
        "num_blocks": max(pages * workload.requests * 5 // 4, 2 * step_tokens // _PAGE_SIZE) + 2,
        "max_batch_tokens": step_tokens,
        "use_cuda_graph": None if attention == "sdpa" else True,
        "use_async_batching": batching == "async",
        # The warm-up has the same prompts, so a shared prefix would spare the timed run its prefill.
        "allow_block_sharing": False,
        "page_size" if "page_size" in known else "block_size": _PAGE_SIZE,
    }
    if "auto_switch_to_flash" in known:
        options["auto_switch_to_flash"] = False
    return options


def generate(manager: Any, prompts: list[list[int]], new_tokens: int) -> list[Any]:
    """Run the prompts; returns the library's outputs in their order."""
    ids = manager.add_requests(prompts, max_new_tokens=new_tokens, record_timestamps=True)
    outputs: dict[str, Any] = {}
    while len(outputs) < len(ids):
        output = manager.get_result(timeout=1)
        if output is not None and output.error:
            raise SystemExit(f"transformers failed a request: {output.error}")
        if output is not None and output.is_finished():
            outputs[output.request_id] = output
        if output is None and not manager.is_running():
            cause = manager.background_thread_status.fatal_error
            raise SystemExit(f"transformers' generation thread ended: {cause!r}")
    return [outputs[request_id] for request_id in ids]


def step_ms_of(outputs: list[Any]) -> float | None:
    """Milliseconds of a decode step, from the times of the tokens of the request that started last."""
    last = max(outputs, key=lambda output: output.timestamps[0])
    marks = [Mark(time_s=moment, steps=step) for step, moment in enumerate(last.timestamps)]
    return median_step_ms(marks, begin_s=last.timestamps[0], end_s=min(output.timestamps[-1] for output in outputs))


def measure(workload: Workload, model: Any, configs: dict[str, Any], attention: str) -> None:
    """Start the manager, warm it up, run the workload, print."""
    prompts = workload.prompts()
    with ExitStack() as stack:
        with heartbeat("capturing graphs"):
            manager = stack.enter_context(model.continuous_batching_context_manager(**configs))
        resolved = manager.continuous_batching_config
        settings = {
            "batching": "async" if resolved.use_async_batching else "sync",
            "attention": attention,
            "cuda_graphs": list(resolved.cuda_graph_booleans),
            "fast_decode_path": bool(resolved.max_blocks_per_request),
        }
        note(f"settings: {settings}")
        with heartbeat("warm-up"):
            generate(manager, prompts, min(WARM_UP_TOKENS, workload.new_tokens))
        with heartbeat("timed run"):
            start = time.perf_counter()
            outputs = generate(manager, prompts, workload.new_tokens)
            seconds = time.perf_counter() - start
    print_result(
        "transformers",
        workload,
        seconds=seconds,
        tokens=sum(len(output.generated_tokens) for output in outputs),
        step_ms=step_ms_of(outputs),
        versions=versions("transformers", "torch", "triton"),
        settings=settings,
    )


def main() -> None:
    """Choose the attention, load, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--batching", choices=["sync", "async"], default="async")
    parser.add_argument("--attention", choices=["auto", "flash", "stand-in", "sdpa"], default="auto")
    args = parser.parse_args()
    workload = Workload.from_arguments(args)
    attention = chosen_attention(args.attention, workload.device)

    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    known = {field.name for field in fields(ContinuousBatchingConfig)}
    with heartbeat(f"loading {workload.preset}, attention {attention}"):
        model = load(workload, attention, paged_names="auto_switch_to_flash" not in known)
    configs = {
        "generation_config": GenerationConfig(
            max_new_tokens=workload.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(
            **batching_options(workload, attention, args.batching, known)
        ),
        "workload_hints": WorkloadHints(
            max_prompt_length=workload.prompt,
            max_generated_length=workload.new_tokens,
            num_requests=workload.requests,
        ),
    }
    measure(workload, model, configs, attention)


if __name__ == "__main__":
    main()
