"""``gapless generate``: many prompts at once, answers in their order.

All prompts are queued together. Where the model has a chat template a prompt is a question to it, as a user would
expect; ``--raw`` lets the model continue the prompt's text instead.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import gapless
from gapless.cli.console import UsageError, reported, say
from gapless.cli.jobs import InputError, Job, read_jobs
from gapless.cli.options import (
    ChatTemplateOption,
    GenerationConfigOption,
    ModelOption,
    QuietOption,
    VerboseOption,
    checked_engine,
    checked_sampling,
    read_chat_template,
    shared_options,
)
from gapless.cli.start import started
from gapless.errors import RequestError
from gapless.outputs import CompletionOutput, RequestOutput
from gapless.whole_files import write_whole

if TYPE_CHECKING:
    from gapless.llm import LLM
    from gapless.prompts import PromptMapping

__all__ = ["generate"]

_SHOWN_PROMPT_CHARACTERS = 100


@shared_options(sampling_defaults={"temperature": 0.0, "max_tokens": 256}, without_engine=["timeline"])
def generate(
    *,
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts. Without any: --input, or standard input, one prompt a line.")
    ] = None,
    model: ModelOption = "smollm2",
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            help='A JSONL file ("-": standard input) whose lines are {"prompt": "..."}, {"messages": [...]} or '
            '{"prompt_token_ids": [...]}, with sampling options of their own if wanted ("max_tokens": 8).',
        ),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the answers to this JSONL file.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put prompts into the model's chat template, or continue them as they are. If not given: the template "
            "where the model has one. Lines with messages are always chats, token ids never.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line instead of text.")] = False,
    chat_template: ChatTemplateOption = None,
    generation_config: GenerationConfigOption = "auto",
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Answer or continue prompts, all of them at once.

    Answers go to standard output; progress and a closing line with the speed go to standard error.
    """
    with reported(verbose=verbose, quiet=quiet):
        options = checked_engine(engine)
        jobs = read_jobs(prompts or [], input_file, checked_sampling(sampling))
        if output_file is not None and not output_file.parent.is_dir():
            raise UsageError(f"--output {output_file}: there is no folder {output_file.parent}")
        template = read_chat_template(chat_template)
        given = {"chat_template": template, "generation_config": generation_config}
        with started(lambda: gapless.LLM, model, options=options, given=given, quiet=quiet) as llm:
            outputs = _run(llm, jobs, chat=chat, quiet=quiet)
        if output_file is not None:
            write_whole(output_file, lambda part: _write_lines(part, _json_lines(jobs, outputs)))
        else:
            _print_answers(jobs, outputs, as_json=as_json)
        failed = [error for error in map(_error_of, outputs) if error is not None]
        if failed:
            raise RequestError(f"{len(failed)} of {len(outputs)} requests failed: {failed[0]}")


def _run(llm: "LLM", jobs: Sequence[Job], *, chat: bool | None, quiet: bool) -> list[RequestOutput]:
    """Queue all jobs together, wait for them, and say how it went."""
    as_chat = llm.tokenizer.has_chat_template if chat is None else chat
    prompts = [_prompt_of(llm, job, as_chat=as_chat) for job in jobs]
    before = llm.counters()
    try:
        outputs = llm.generate(prompts, [job.params for job in jobs], use_tqdm=False if quiet else None)
    except RequestError as error:
        raise InputError(_with_place(str(error), jobs)) from error
    after = llm.counters()
    if not quiet:
        share = after.device.since(before.device).active_share
        say(_closing_line(outputs, active_share=share, preemptions=after.preemptions - before.preemptions))
    return outputs


def _prompt_of(llm: "LLM", job: Job, *, as_chat: bool) -> "PromptMapping":
    if job.source == "prompt_token_ids":
        return {"prompt_token_ids": job.value}
    if job.source == "prompt" and not as_chat:
        return {"prompt": job.value}
    messages = job.value if job.source == "messages" else [{"role": "user", "content": job.value}]
    try:
        chat = llm.tokenizer.rendered_chat(messages)
        return {"prompt": chat.text(), "prompt_token_ids": chat.token_ids()}
    except RequestError as error:
        raise InputError(f"{job.place}: {error}") from error


def _with_place(message: str, jobs: Sequence[Job]) -> str:
    """Name a prompt by where it was read, instead of by its index."""
    for index, job in enumerate(jobs):
        if message.startswith(f"prompts[{index}]"):
            return job.place + message.removeprefix(f"prompts[{index}]")
    return message


def _print_answers(jobs: Sequence[Job], outputs: Sequence[RequestOutput], *, as_json: bool) -> None:
    if as_json:
        for line in _json_lines(jobs, outputs):
            print(line)
        return
    for job, output in zip(jobs, outputs, strict=True):
        if len(jobs) > 1:
            print(f"> {_shown_prompt(job)}")
        for choice in output.outputs:
            if len(output.outputs) > 1:
                print(f"[{choice.index}]")
            print(choice.text)
        if len(jobs) > 1:
            print()


def _shown_prompt(job: Job) -> str:
    text = job.value[-1]["content"] if job.source == "messages" else job.value
    line = " ".join(str(text).split())
    return line if len(line) <= _SHOWN_PROMPT_CHARACTERS else line[: _SHOWN_PROMPT_CHARACTERS - 3] + "..."


def _json_lines(jobs: Sequence[Job], outputs: Sequence[RequestOutput]) -> Iterable[str]:
    """A line for each choice."""
    for job, output in zip(jobs, outputs, strict=True):
        for completion in output.outputs:
            yield _json_line(job, output, completion)


def _json_line(job: Job, output: RequestOutput, completion: CompletionOutput) -> str:
    metrics = output.metrics
    assert metrics is not None
    record = {
        **job.extra,
        job.source: job.value,
        **({"index": completion.index} if len(output.outputs) > 1 else {}),
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "error": completion.error,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "ttft_s": metrics.ttft_s,
        "tpot_s": metrics.tpot_s(len(completion.token_ids)),
    }
    return json.dumps(record, ensure_ascii=False)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)


def _closing_line(outputs: Sequence[RequestOutput], *, active_share: float | None, preemptions: int) -> str:
    tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    parts = [_count(len(outputs), "request"), _count(tokens, "token")]
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    ends = [m.finished_s for m in metrics if m.finished_s is not None]
    if ends:
        span_s = max(ends) - min(m.arrived_s for m in metrics)
        parts.append(f"{tokens / span_s:,.1f} tokens/s" if span_s > 0 else "no time")
    for name, values in (
        ("TTFT", [m.ttft_s for m in metrics]),
        ("TPOT", [output.metrics.tpot_s(_longest(output)) for output in outputs if output.metrics]),
    ):
        measured = [value for value in values if value is not None]
        if measured:
            parts.append(f"median {name} {statistics.median(measured) * 1e3:,.1f} ms")
    if active_share is not None:
        parts.append(f"device active {active_share:.0%}")
    if preemptions:
        parts.append(_count(preemptions, "preemption"))
    return ", ".join(parts)


def _error_of(output: RequestOutput) -> str | None:
    return next((choice.error for choice in output.outputs if choice.error is not None), None)


def _longest(output: RequestOutput) -> int:
    return max(len(choice.token_ids) for choice in output.outputs)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
