"""The options of ``gapless bench serve``, one alias each."""

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "ApiKeyOption",
    "ConcurrencyOption",
    "EndpointOption",
    "InputOption",
    "ItlTargetOption",
    "JsonOption",
    "NewTokensOption",
    "PictureOption",
    "PromptTokensOption",
    "RateOption",
    "RequestsOption",
    "SeedOption",
    "ServedModelOption",
    "StopAtEosOption",
    "TimeoutOption",
    "TtftTargetOption",
    "UrlOption",
    "WarmUpOption",
]

UrlOption: TypeAlias = Annotated[str, typer.Option("--url", help="The server; /v1 is added if it has no path.")]
RateOption: TypeAlias = Annotated[
    list[float] | None, typer.Option("--rate", help="Requests a second, arriving at random times: --rate 1 2 4.")
]
ConcurrencyOption: TypeAlias = Annotated[
    list[int] | None,
    typer.Option("--concurrency", help="Requests under way, each followed by the next: --concurrency 1 8 64 256."),
]
EndpointOption: TypeAlias = Annotated[str, typer.Option("--endpoint", help="completions or chat.")]
ServedModelOption: TypeAlias = Annotated[
    str | None, typer.Option("--model", "-m", help="Its name on the server; the first that it lists if unset.")
]
InputOption: TypeAlias = Annotated[
    Path | None, typer.Option("--input", "-i", help="Real prompts: a JSONL file as gapless generate takes it.")
]
RequestsOption: TypeAlias = Annotated[
    int | None, typer.Option("--requests", help="At each level; half a minute of them, or four rounds, if unset.")
]
PromptTokensOption: TypeAlias = Annotated[
    int, typer.Option("--prompt-tokens", help="Of random prompts; in chats, words of about a token.")
]
NewTokensOption: TypeAlias = Annotated[int, typer.Option("--new-tokens", help="Tokens to generate for each prompt.")]
StopAtEosOption: TypeAlias = Annotated[
    bool, typer.Option("--stop-at-eos", help="Do not send ignore_eos, which OpenAI's own API does not have.")
]
TtftTargetOption: TypeAlias = Annotated[
    float | None, typer.Option("--ttft-slo", help="Goodput: the first token comes within so many ms.")
]
ItlTargetOption: TypeAlias = Annotated[
    float | None, typer.Option("--itl-slo", help="Goodput: 99 % of a request's times between tokens, in ms.")
]
WarmUpOption: TypeAlias = Annotated[
    int, typer.Option("--warm-up", help="Requests before the first level, not measured.")
]
TimeoutOption: TypeAlias = Annotated[float, typer.Option("--timeout", help="For one answer, in seconds.")]
ApiKeyOption: TypeAlias = Annotated[
    str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
]
SeedOption: TypeAlias = Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")]
JsonOption: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Write all figures and every request's times.")
]
PictureOption: TypeAlias = Annotated[
    Path | None, typer.Option("--picture", help="Draw throughput and latency over the load (*.png or *.svg).")
]
