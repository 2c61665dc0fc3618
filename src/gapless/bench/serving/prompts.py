"""What is sent: :class:`ServingRequest`, a path and a body that is encoded before the clock runs.

Random prompts are made without the model's tokenizer, which the client does not have. For completions they are token
ids, exactly as many as asked for; for chats they are short words, and the server's usage tells how many tokens they
were. No two begin alike, so nothing comes from a prefix cache. Pure functions.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from gapless.errors import ConfigError
from gapless.prompt_files import InputError, Job, parse_jsonl
from gapless.sampling_params import SamplingParams

__all__ = ["PATHS", "Endpoint", "ServingRequest", "file_requests", "random_requests", "serving_request"]

Endpoint = Literal["chat", "completions"]
PATHS: Final[dict[Endpoint, str]] = {"chat": "/chat/completions", "completions": "/completions"}

# Ids that plain text has in every vocabulary we know of: the lowest few are often control tokens.
_FIRST_ID, _LAST_ID = 16, 250
_WORDS: Final = (
    "air book cold day east fish gold hand iron jump king leaf moon name open path rain salt time upon vast wind year "
    "apple bread chair dance eagle field green house light music night ocean paper river stone table under water"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRequest:
    """One request; ``path`` is below the server's ``/v1``, ``body`` is JSON and asks for a stream with usage."""

    path: str
    body: bytes


def random_requests(
    endpoint: Endpoint,
    *,
    count: int,
    prompt_tokens: int,
    new_tokens: int,
    model: str | None,
    seed: int,
    ignore_eos: bool,
) -> list[ServingRequest]:
    """Greedy requests of one size.

    Args:
        endpoint: where they go.
        count: how many.
        prompt_tokens: of each prompt; words for a chat.
        new_tokens: to generate.
        model: the name that the server knows it by; ``None`` leaves it out.
        seed: of the prompts.
        ignore_eos: generate all of ``new_tokens``; an extension of OpenAI's API that many servers have.

    Raises:
        ConfigError: a number that cannot be.
    """
    for name, value in (("requests", count), ("prompt-tokens", prompt_tokens), ("new-tokens", new_tokens)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    draw = random.Random(seed)
    made = []
    for index in range(count):
        if endpoint == "completions":
            prompt: Any = [draw.randint(_FIRST_ID, _LAST_ID) for _ in range(prompt_tokens)]
        else:
            words = [str(index), *draw.choices(_WORDS.split(), k=prompt_tokens)][:prompt_tokens]
            prompt = [{"role": "user", "content": " ".join(words)}]
        fields = {"max_tokens": new_tokens, "temperature": 0.0} | ({"ignore_eos": True} if ignore_eos else {})
        made.append(serving_request(endpoint, prompt, model, fields))
    return made


def file_requests(
    path: Path, endpoint: Endpoint, *, count: int, new_tokens: int, model: str | None
) -> list[ServingRequest]:
    """The prompts of a JSONL file, in the format of ``gapless generate --input``, over again until there are enough.

    Of a line's sampling options, those that OpenAI's API has are sent.

    Args:
        path: the file.
        endpoint: where they go: a ``prompt`` is a user's message in a chat; ``messages`` need a chat, ids completions.
        count: how many.
        new_tokens: of lines that do not say.
        model: the name that the server knows it by; ``None`` leaves it out.

    Raises:
        InputError: a line that is no prompt, or none for this endpoint.
        ConfigError: the file has no prompt.
        OSError: it cannot be read.
    """
    with path.open(encoding="utf-8") as lines:
        jobs = parse_jsonl(lines, str(path), SamplingParams(temperature=0.0, max_tokens=new_tokens))
    if not jobs:
        raise ConfigError(f'{path} has no prompts: write lines such as {{"prompt": "..."}}')
    requests = [serving_request(endpoint, _prompt_of(job, endpoint), model, _options_of(job.params)) for job in jobs]
    return [requests[index % len(requests)] for index in range(count)]


def _prompt_of(job: Job, endpoint: Endpoint) -> Any:
    if endpoint == "chat" and job.source == "prompt":
        return [{"role": "user", "content": job.value}]
    if (endpoint == "chat") != (job.source == "messages"):
        needed = "completions" if endpoint == "chat" else "chat"
        raise InputError(f"{job.place}: {job.source} cannot go to {endpoint}: use --endpoint {needed}")
    return job.value


def _options_of(params: SamplingParams) -> dict[str, Any]:
    options: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
        "stop": list(params.stops) or None,
        "presence_penalty": params.presence_penalty or None,
        "frequency_penalty": params.frequency_penalty or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def serving_request(endpoint: Endpoint, prompt: Any, model: str | None, options: dict[str, Any]) -> ServingRequest:
    """A request with a prompt as the endpoint takes it; ``options`` are further fields of its body."""
    field = "messages" if endpoint == "chat" else "prompt"
    body = {field: prompt, "stream": True, "stream_options": {"include_usage": True}, **options}
    if model is not None:
        body["model"] = model
    return ServingRequest(path=PATHS[endpoint], body=json.dumps(body).encode())
