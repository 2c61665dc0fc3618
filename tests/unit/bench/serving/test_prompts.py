"""What the load generator sends."""

import json
from pathlib import Path

import pytest

from gapless.bench.serving.options import ServingOptions
from gapless.bench.serving.prompts import file_requests, random_requests
from gapless.errors import ConfigError, GaplessError


def test_random_completions_have_exactly_so_many_ids() -> None:
    requests = random_requests(
        "completions", count=5, prompt_tokens=40, new_tokens=7, model="m", seed=1, ignore_eos=True
    )
    bodies = [json.loads(request.body) for request in requests]
    assert {request.path for request in requests} == {"/completions"}
    assert [len(body["prompt"]) for body in bodies] == [40] * 5
    assert len({tuple(body["prompt"][:16]) for body in bodies}) == 5, "no two may share a block of the prefix cache"
    expected = {"max_tokens": 7, "temperature": 0.0, "ignore_eos": True, "model": "m", "stream": True}
    for body in bodies:
        assert body | expected == body
        assert body["stream_options"] == {"include_usage": True}


def test_random_chats_have_words_and_no_extension_unless_wanted() -> None:
    [first, second] = random_requests(
        "chat", count=2, prompt_tokens=12, new_tokens=7, model=None, seed=1, ignore_eos=False
    )
    body = json.loads(first.body)
    assert first.path == "/chat/completions"
    assert "ignore_eos" not in body
    assert "model" not in body
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 12
    assert message["content"] != json.loads(second.body)["messages"][0]["content"]


def test_a_file_is_used_again_until_there_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 3, "top_p": 0.5}\n{"prompt_token_ids": [5, 6], "stop": "x"}\n')
    requests = file_requests(path, "completions", count=5, new_tokens=9, model="m")
    bodies = [json.loads(request.body) for request in requests]
    assert [body["prompt"] for body in bodies] == ["one", [5, 6], "one", [5, 6], "one"]
    assert (bodies[0]["max_tokens"], bodies[0]["top_p"]) == (3, 0.5)
    assert (bodies[1]["max_tokens"], bodies[1]["stop"]) == (9, ["x"])
    assert "seed" not in bodies[0]


def test_prompts_and_messages_in_a_chat(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    said = [json.loads(r.body)["messages"] for r in file_requests(path, "chat", count=2, new_tokens=9, model=None)]
    assert said == [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "hi"}]]
    with pytest.raises(GaplessError, match=r"prompts.jsonl:2: messages cannot go to completions: use --endpoint chat"):
        file_requests(path, "completions", count=2, new_tokens=9, model=None)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        file_requests(tmp_path / "empty.jsonl", "chat", count=1, new_tokens=9, model=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--rate or by --concurrency"),
        ({"rates": (1.0,), "concurrencies": (1,)}, "not by both"),
        ({"rates": (0.0,)}, "rate=0.0"),
        ({"rates": (float("inf"),)}, "rate=inf"),
        ({"concurrencies": (-1,)}, "concurrency=-1"),
        ({"rates": (1.0,), "endpoint": "embeddings"}, "endpoint='embeddings'"),
        ({"rates": (1.0,), "requests": 0}, "requests=0"),
        ({"rates": (1.0,), "prompt_tokens": 0}, "prompt-tokens=0"),
        ({"rates": (1.0,), "warm_up": -1}, "warm-up=-1"),
        ({"rates": (1.0,), "timeout_s": 0.0}, "timeout=0.0"),
        ({"rates": (1.0,), "url": "nowhere"}, "url='nowhere'"),
    ],
)
def test_wrong_options_are_refused_with_their_value(given: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"url": "http://x", **given}
    with pytest.raises(ConfigError, match=message):
        ServingOptions(**options)  # type: ignore[arg-type]


def test_v1_is_added_to_a_url_without_a_path_only() -> None:
    assert str(ServingOptions(url="http://x:1", rates=(1.0,)).origin) == "http://x:1/v1"
    assert str(ServingOptions(url="http://x:1/api/v3", rates=(1.0,)).origin) == "http://x:1/api/v3"


def test_levels_and_the_warm_up_have_prompts_of_their_own() -> None:
    options = ServingOptions(url="http://x", concurrencies=(1, 2), prompt_tokens=20)
    bodies = [request.body for place in range(3) for request in options.make_requests(place, 4, "m")]
    assert len(set(bodies)) == 12
    assert [request.body for request in options.make_requests(1, 4, "m")] == bodies[4:8]
