"""gapless on the common workload, through the public API: one :class:`gapless.LLM`, one ``generate``.

Prints one JSON line, see ``workload.py``; progress goes to standard error::

    PYTHONPATH=src python benchmarks/peers/gapless_offline.py --depth 2 --requests 32 --prompt 256 --new-tokens 8192
"""

import argparse
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workload import (
    WARM_UP_TOKENS,
    Mark,
    Workload,
    add_workload_arguments,
    heartbeat,
    median_step_ms,
    print_result,
    versions,
)

from gapless import LLM, RequestOutput, SamplingParams

_SAMPLE_S = 0.02


@contextmanager
def watched(llm: LLM, requests: int) -> Iterator[list[Mark]]:
    """Marks of the steps that applied a token for each request, taken from the engine's counters 50 times a second."""
    marks: list[Mark] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_S):
            tokens = llm.counters().output_tokens
            marks.append(Mark(time_s=time.perf_counter(), steps=tokens / requests))

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield marks
    finally:
        done.set()
        thread.join()


def generate(llm: LLM, workload: Workload, new_tokens: int) -> list[RequestOutput]:
    """Run the workload's prompts."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return llm.generate(workload.prompts(), params, use_tqdm=False)


def main() -> None:
    """Load, warm up, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_workload_arguments(parser)
    parser.add_argument("--depth", type=int, default=2)
    args = parser.parse_args()
    workload = Workload.from_arguments(args)
    with heartbeat(f"loading {workload.preset}"):
        options: dict[str, Any] = {"device": workload.device, "dtype": workload.dtype}
        llm = LLM(
            workload.preset,
            load_format="dummy",
            depth=args.depth,
            max_rows=workload.requests,
            max_model_len=workload.context,
            enable_prefix_caching=False,
            **options,
        )
    with llm:
        with heartbeat("warm-up"):
            generate(llm, workload, min(WARM_UP_TOKENS, workload.new_tokens))
        with heartbeat("timed run"), watched(llm, workload.requests) as marks:
            start = time.perf_counter()
            outputs = generate(llm, workload, workload.new_tokens)
            seconds = time.perf_counter() - start
    moments = [output.metrics for output in outputs if output.metrics]
    step_ms = median_step_ms(
        marks,
        begin_s=max(moment.first_token_s or 0.0 for moment in moments),
        end_s=min(moment.finished_s or 0.0 for moment in moments),
    )
    print_result(
        "gapless",
        workload,
        seconds=seconds,
        tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        step_ms=step_ms,
        versions=versions("gapless", "torch", "triton", "transformers"),
        settings={"depth": args.depth},
    )


if __name__ == "__main__":
    main()
