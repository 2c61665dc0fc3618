"""``gapless chat``: a talk with a model, streamed, with the history of what was said.

The prompt is read in the main thread; an answer runs in an event loop until it ends or Ctrl-C stops it. Input may also
be a pipe: then one line is one message, and standard output holds the answers alone.
"""

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

import gapless
from gapless.cli.console import UsageError, reported, say, stderr
from gapless.cli.conversation import Conversation
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
from gapless.errors import EngineDeadError, RequestError
from gapless.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gapless.async_llm import AsyncLLM

__all__ = ["chat"]

_HELP = """\
/reset  forget what was said
/help   this list
/exit   leave (so does Ctrl-D)
Ctrl-C stops an answer."""


@shared_options(
    sampling_defaults={"temperature": 0.7, "top_p": 0.95, "max_tokens": 1024},
    without=["n"],
    without_engine=["timeline"],
)
def chat(
    *,
    model: ModelOption = "smollm2",
    system: Annotated[str | None, typer.Option("--system", help="A system message to start with.")] = None,
    chat_template: ChatTemplateOption = None,
    generation_config: GenerationConfigOption = "auto",
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model. Ctrl-C stops an answer; /help lists what else there is."""
    with reported(verbose=verbose, quiet=quiet):
        options, params = checked_engine(engine), checked_sampling(sampling)
        template = read_chat_template(chat_template)
        given = {"chat_template": template, "generation_config": generation_config}
        llm = started(lambda: gapless.AsyncLLM, model, options=options, given=given, quiet=quiet)
        try:
            if not llm.tokenizer.has_chat_template:
                raise UsageError(f"{model} has no chat template: give one (--chat-template), or use gapless generate")
            _talk(llm, llm.resolve_sampling_params(params), system)
        finally:
            llm.close()


def _talk(llm: "AsyncLLM", params: SamplingParams, system: str | None) -> None:
    conversation = Conversation(
        llm.tokenizer, system=system, max_model_len=llm.max_model_len, max_answer=params.max_tokens
    )
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing, and there is none in a pipe
        say("/help lists the commands, Ctrl-D leaves", style="dim")
    with asyncio.Runner() as runner:
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    print()
                return
            except KeyboardInterrupt:
                print()
                say("Ctrl-D or /exit leaves", style="dim")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                _command(line, conversation)
            elif line:
                _exchange(runner, llm, params, conversation, line)


def _command(line: str, conversation: Conversation) -> None:
    if line == "/reset":
        conversation.reset()
        say("the talk starts anew", style="dim")
    else:
        say(_HELP if line == "/help" else f"{line.split()[0]} is no command\n{_HELP}", style="dim")


def _exchange(
    runner: asyncio.Runner, llm: "AsyncLLM", params: SamplingParams, conversation: Conversation, text: str
) -> None:
    """One question and its answer, which may be stopped half-way and is then remembered as far as it came."""
    conversation.ask(text)
    answer = _Answer()
    try:
        num_forgotten = conversation.trim()
        if num_forgotten:
            say(
                f"the context of {llm.max_model_len} tokens is full: the oldest {num_forgotten} messages are forgotten",
                style="yellow",
            )
        runner.run(answer.stream(llm, params, conversation))
    except KeyboardInterrupt:
        say("(stopped)", style="dim")
    except EngineDeadError:
        raise
    except RequestError as error:
        say(f"error: {error}", style="bold red")
    conversation.answer(answer.text)


class _Answer:
    """An answer as it is printed."""

    def __init__(self) -> None:
        self.text = ""

    async def stream(self, llm: "AsyncLLM", params: SamplingParams, conversation: Conversation) -> None:
        """Print what comes as it comes."""
        error = None
        try:
            async for output in llm.chat(conversation.messages, params):
                completion = output.outputs[0]
                print(completion.text[len(self.text) :], end="", flush=True)
                self.text, error = completion.text, completion.error
        finally:
            print(flush=True)
        if error is not None:
            raise RequestError(error)
        if completion.finish_reason == "length":
            say(f"(cut after {len(completion.token_ids)} tokens: --max-tokens)", style="dim")
        if stderr.is_terminal and output.metrics is not None:
            tpot_s = output.metrics.tpot_s(len(completion.token_ids))
            if tpot_s:
                say(f"{len(completion.token_ids)} tokens, {1 / tpot_s:.1f} tokens/s", style="dim")
