"""Requests whose right answers are known, and whether an answer is right: :class:`GoodRequest`, :func:`learn`.

An answer does not depend on who else is being served, so each request is sent alone once, and from then on every
answer must be the same. Where arithmetic in another order could change a token (two candidates as good as equal), alone
and in a crowd differ now and then; :func:`learn` sends each in a crowd as well and keeps those that agree.

Random weights would say bytes that are no text, so models without a tokenizer of their own are asked for printable
ASCII only. Sampled with a seed, an answer looks like no other, so that a swapped or a lost token cannot hide.
"""

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gapless.bench.serving.event_stream import EventStream
from gapless.bench.serving.http_client import HttpClient

Outcome = Literal["right", "wrong", "refused for load"]
_PRINTABLE = list(range(32, 127))
_WORDS = ("the sea was calm and a small boat went out to look for fish near the old stone bridge at night").split()  # noqa: SIM905
_LOGPROB_TOLERANCE = 1e-3
_CROWD = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer; ``logprobs`` are those of its tokens, if any were asked for."""

    text: str
    finish_reason: str | None
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodRequest:
    """A request without ``stream``, and its right answer once that is known."""

    path: str
    body: dict[str, Any]
    answer: tuple[Choice, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What came of a request; ``detail`` says what was wrong."""

    outcome: Outcome
    detail: str = ""


def draw_requests(count: int, *, seed: int, max_tokens: int, printable: bool) -> list[GoodRequest]:
    """Plain ones, and with log-probs, several choices, penalties, chats and text prompts, in turn.

    Args:
        count: how many.
        seed: of the prompts.
        max_tokens: of the longest answer.
        printable: allow printable ASCII only, of a vocabulary of bytes.
    """
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        body: dict[str, Any] = {
            "max_tokens": draw.randint(max(1, max_tokens // 4), max_tokens),
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
        }
        if printable:
            body["allowed_token_ids"] = _PRINTABLE
        words = [str(number), *draw.choices(_WORDS, k=draw.randint(1, 60))]
        match number % 5:
            case 0:
                body |= {"prompt": [ord(each) for each in " ".join(words)]}
            case 1:
                body |= {"prompt": " ".join(words), "logprobs": 2}
            case 2:
                body |= {"messages": [{"role": "user", "content": " ".join(words)}], "top_p": 0.9}
            case 3:
                body |= {"prompt": " ".join(words), "n": 3}
            case _:
                body |= {"prompt": " ".join(words), "temperature": 0.0, "frequency_penalty": 1.0}
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        requests.append(GoodRequest(path=path, body=body))
    return requests


async def learn(client: HttpClient, requests: Sequence[GoodRequest]) -> list[GoodRequest]:
    """Those requests that are answered alike alone and in a crowd, with their answers, some ended by a stop string.

    Raises:
        SystemExit: more than one in ten differ, which is no matter of rounding.
    """
    known = [replace(each, answer=await _answer(client, each)) for each in requests]
    known += [await _stopped(client, each) for each in known if len(each.answer) == 1]
    crowd: list[Result] = []
    for start in range(0, len(known), _CROWD):
        group = enumerate(known[start : start + _CROWD])
        crowd += await asyncio.gather(*(send(client, each, stream=number % 2 == 0) for number, each in group))
    kept = [each for each, result in zip(known, crowd, strict=True) if result.outcome == "right"]
    if len(kept) < 0.9 * len(known):
        raise SystemExit(f"of {len(known)} answers {len(known) - len(kept)} differ in a crowd: {crowd[:3]}")
    return kept


async def _stopped(client: HttpClient, request: GoodRequest) -> GoodRequest:
    """The same request with a stop string from the middle of its answer."""
    text = request.answer[0].text
    stop = text[len(text) // 2 :][:4]
    if not stop:
        return request
    stopped = replace(request, body={**request.body, "stop": [stop]})
    answer = await _answer(client, stopped)
    if answer[0].text != text[: text.index(stop)] or answer[0].finish_reason != "stop":
        raise SystemExit(f"stop={stop!r} of {text!r} gives {answer}")
    return replace(stopped, answer=answer)


async def send(client: HttpClient, request: GoodRequest, *, stream: bool) -> Result:
    """Send a request whose answer is known, and compare.

    Raises:
        HttpError: the connection broke, which it must not.
    """
    body = json.dumps({**request.body, "stream": stream}).encode()
    async with client.request("POST", request.path, body) as response:
        if response.status != 200:
            detail = (await response.body()).decode(errors="replace")[:300]
            refused = response.status == 429 and int(response.headers.get("retry-after", "0")) > 0
            return Result(outcome="refused for load" if refused else "wrong", detail=f"{response.status}: {detail}")
        if stream:
            events, stream_of_events = [], EventStream()
            async for piece in response.pieces():
                events += stream_of_events.feed(piece)
            if not events or events[-1] != "[DONE]":
                return Result(outcome="wrong", detail=f"a stream that ends with {events[-1:]}")
            chunks = [json.loads(event) for event in events[:-1]]
        else:
            chunks = [json.loads(await response.body())]
    return _judged(request, choices_of(chunks))


def _judged(request: GoodRequest, answer: tuple[Choice, ...]) -> Result:
    if len(answer) == len(request.answer) and all(map(_is_same, answer, request.answer)):
        return Result(outcome="right")
    return Result(outcome="wrong", detail=f"{answer} instead of {request.answer} for {request.body}")


def _is_same(found: Choice, right: Choice) -> bool:
    return (
        found.text == right.text
        and found.finish_reason == right.finish_reason
        and len(found.logprobs) == len(right.logprobs)
        and all(abs(a - b) < _LOGPROB_TOLERANCE for a, b in zip(found.logprobs, right.logprobs, strict=True))
    )


async def _answer(client: HttpClient, request: GoodRequest) -> tuple[Choice, ...]:
    async with client.request("POST", request.path, json.dumps(request.body).encode()) as response:
        answer = json.loads(await response.body())
    if response.status != 200:
        raise SystemExit(f"{request.body} is refused: {answer}")
    return choices_of([answer])


def choices_of(chunks: Iterable[dict[str, Any]]) -> tuple[Choice, ...]:
    """The choices of an answer, whole or in chunks, by index."""
    texts: defaultdict[int, str] = defaultdict(str)
    reasons: dict[int, str | None] = {}
    logprobs: defaultdict[int, list[float]] = defaultdict(list)
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            message = choice.get("delta") or choice.get("message") or {}
            texts[index] += choice.get("text") or message.get("content") or ""
            reasons[index] = choice["finish_reason"] or reasons.get(index)
            logprobs[index] += (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return tuple(Choice(texts[index], reasons[index], tuple(logprobs[index])) for index in sorted(texts))
