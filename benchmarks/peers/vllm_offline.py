"""vLLM on the common workload, where it is installed: one ``LLM``, stepped by hand, so that every step has its time.

``LLM.generate`` steps the same engine in the same way and only keeps the time of the whole. With vLLM's own default the
engine runs in a process of its own and schedules ahead; ``--scheduling sync`` turns the latter off.

Prints one JSON line, see ``workload.py``; progress goes to standard error. Without vLLM it says so and exits with 3::

    PYTHONPATH=src python benchmarks/peers/vllm_offline.py --requests 32 --prompt 256 --new-tokens 8192
"""

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from importlib.util import find_spec
from typing import Any

from workload import (
    NOT_INSTALLED,
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

_request_ids = itertools.count()


def write_config(preset: str, folder: str) -> None:
    """Put the shape into ``folder`` as the ``config.json`` of a model without weights."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from gapless.model.checkpoint.presets import PRESETS

    config = AutoConfig.for_model(**PRESETS[preset])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)


def load(workload: Workload, folder: str, scheduling: str) -> Any:
    """vLLM's blocking API over random weights; the token ids need no tokenizer."""
    from vllm import LLM

    chosen = {} if scheduling == "default" else {"async_scheduling": scheduling == "async"}
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=workload.dtype,
        max_model_len=workload.context,
        max_num_seqs=workload.requests,
        enable_prefix_caching=False,
        **chosen,
    )


def generate(llm: Any, workload: Workload, new_tokens: int) -> list[list[float]]:
    """Run the prompts; returns for each request the moment at which each of its tokens came, in seconds."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    moments: defaultdict[str, list[float]] = defaultdict(list)
    for prompt in workload.prompts():
        engine.add_request(str(next(_request_ids)), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            moments[output.request_id] += [now] * len(output.outputs[0].token_ids)
    return list(moments.values())


def step_ms_of(moments: list[list[float]]) -> float | None:
    """Milliseconds of a decode step, from the tokens of the last request to start."""
    last = max(moments, key=lambda times: times[0])
    marks = [Mark(time_s=moment, steps=step) for step, moment in enumerate(last)]
    return median_step_ms(marks, begin_s=last[0], end_s=min(times[-1] for times in moments))


def main() -> int:
    """Load, warm up, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--scheduling", choices=["default", "sync", "async"], default="default")
    args = parser.parse_args()
    workload = Workload.from_arguments(args)
    if find_spec("vllm") is None:
        note("vLLM is not installed (pip install vllm, into an environment of its own)")
        return NOT_INSTALLED
    with tempfile.TemporaryDirectory() as folder:
        write_config(workload.preset, folder)
        with heartbeat(f"loading {workload.preset}"):
            llm = load(workload, folder, args.scheduling)
        with heartbeat("warm-up"):
            generate(llm, workload, min(WARM_UP_TOKENS, workload.new_tokens))
        with heartbeat("timed run"):
            start = time.perf_counter()
            moments = generate(llm, workload, workload.new_tokens)
            seconds = time.perf_counter() - start
    print_result(
        "vllm",
        workload,
        seconds=seconds,
        tokens=sum(map(len, moments)),
        step_ms=step_ms_of(moments),
        versions=versions("vllm", "torch", "triton", "transformers"),
        settings={"scheduling": args.scheduling},
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
