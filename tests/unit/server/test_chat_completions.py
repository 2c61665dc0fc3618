"""``/v1/chat/completions``: answers, streams, log-probs, usage, templates."""

from typing import Any

import pytest

from fixtures.api_server import EMOJI, ApiServer

CHAT = "/v1/chat/completions"
ANSWER = "himore"  # with a special token between the two words


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def texts_of(chunks: list[Any], n: int = 1) -> list[str]:
    """The text of each choice of a stream."""
    texts = [""] * n
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    return texts


def test_an_answer(server: ApiServer) -> None:
    content = server.chat("Hello")
    assert content["object"] == "chat.completion"
    assert content["id"].startswith("chatcmpl-")
    assert content["model"] == "tiny"
    [choice] = content["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }


def test_c55_a_stream_has_the_order_of_openai(server: ApiServer) -> None:
    chunks = server.stream(CHAT, messages=user("Hello"), temperature=0, n=3)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert len({chunk["created"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    of_choice: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        [choice] = chunk["choices"]
        of_choice[choice["index"]].append(choice)
    for choices in of_choice.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["delta"] == {}
        assert choices[-1]["finish_reason"] == "stop"
    assert texts_of(chunks, 3) == [ANSWER] * 3


@pytest.mark.parametrize("n", [1, 3])
def test_c55_usage(server: ApiServer, n: int) -> None:
    whole = server.chat("Hello", n=n)["usage"]
    num_prompt_tokens = len(server.ok("/tokenize", messages=user("Hello"))["tokens"])
    assert whole["prompt_tokens"] == num_prompt_tokens
    assert whole["completion_tokens"] == n * 8  # two letters, a special token, four letters, EOS
    assert whole["total_tokens"] == num_prompt_tokens + n * 8

    options = {"include_usage": True}
    *chunks, last = server.stream(CHAT, messages=user("Hello"), temperature=0, n=n, stream_options=options)
    assert last["choices"] == []
    assert {name: last["usage"][name] for name in whole if "details" not in name} == {
        name: whole[name] for name in whole if "details" not in name
    }
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)


def test_c55_usage_of_every_chunk_where_asked_for(server: ApiServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(CHAT, messages=user("Hello"), temperature=0, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_c55_null_options_are_as_absent(server: ApiServer) -> None:
    chunks = server.stream(CHAT, messages=user("Hello"), temperature=0, stream_options=None)
    assert all(chunk["choices"] for chunk in chunks)
    assert texts_of(chunks) == [ANSWER]


def test_cached_tokens_are_told(server: ApiServer) -> None:
    prompt = "a rather long beginning that fills some blocks of the cache, twice the same"
    first = server.chat(prompt)["usage"]
    second = server.chat(prompt)["usage"]
    assert first["prompt_tokens"] == second["prompt_tokens"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["prompt_tokens"]
    salted = server.chat(prompt, cache_salt="mine")["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_c26_logprobs_alone_have_no_alternatives(server: ApiServer) -> None:
    [choice] = server.chat("Hello", logprobs=True)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["h", "i", "<|im_end|>", "m", "o", "r", "e", "</s>"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    assert entries[0]["bytes"] == [ord("h")]
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize("temperature", [0, 0.5, 2])
def test_c26_logprobs_are_those_of_the_raw_logits(server: ApiServer, temperature: float) -> None:
    messages = [*user("go"), {"role": "assistant", "content": "L"}]
    expected = {"x": -0.407606, "y": -1.407606, "z": -2.407606}
    for seed in range(4):
        content = server.ok(
            CHAT,
            messages=messages,
            continue_final_message=True,
            temperature=temperature,
            seed=seed,
            max_tokens=1,
            logprobs=True,
            top_logprobs=2,
        )
        [entry] = content["choices"][0]["logprobs"]["content"]
        assert entry["logprob"] == pytest.approx(expected[entry["token"]], abs=1e-4)
        assert [top["token"] for top in entry["top_logprobs"]] == ["x", "y"]
        for top in entry["top_logprobs"]:
            assert top["logprob"] == pytest.approx(expected[top["token"]], abs=1e-4)


def test_streamed_logprobs_equal_whole_ones(server: ApiServer) -> None:
    options = {"messages": user("Hello"), "temperature": 0, "logprobs": True, "top_logprobs": 3, "stop": "r"}
    whole = server.ok(CHAT, **options)["choices"][0]
    streamed: list[Any] = []
    for chunk in server.stream(CHAT, **options):
        logprobs = chunk["choices"][0]["logprobs"]
        streamed += [] if logprobs is None else logprobs["content"]
    assert streamed == whole["logprobs"]["content"]
    assert whole["message"]["content"] == "himo"
    assert whole["stop_reason"] == "r"


@pytest.mark.parametrize("fields", [{"top_logprobs": 21, "logprobs": True}, {"top_logprobs": 2}])
def test_c26_impossible_numbers_of_alternatives(server: ApiServer, fields: dict[str, Any]) -> None:
    reply = server.post(CHAT, messages=user("x"), **fields)
    assert reply.status == 400
    assert reply.error["param"] == "top_logprobs"
    server.assert_serves()


def test_bytes_of_a_character_in_several_tokens(server: ApiServer) -> None:
    messages = [*user("go"), {"role": "assistant", "content": "E"}]
    options = {"messages": messages, "continue_final_message": True, "temperature": 0, "logprobs": True}
    [choice] = server.ok(CHAT, **options)["choices"]
    assert choice["message"]["content"] == EMOJI.decode()
    entries = choice["logprobs"]["content"][:-1]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == EMOJI
    for chunk in server.stream(CHAT, **options):
        assert "\ufffd" not in chunk["choices"][0]["delta"].get("content", "")


def test_c34_every_way_to_stop(server: ApiServer) -> None:
    stops: list[dict[str, Any]] = [{"stop": ["<|im_end|>"]}, {"stop_token_ids": [259]}, {"stop": "<|im_end|>"}]
    for stop in stops:
        for skip in (True, False):
            options = {"messages": user("Hello"), "temperature": 0, "skip_special_tokens": skip, **stop}
            [choice] = server.ok(CHAT, **options)["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == "hi"
            chunks = server.stream(CHAT, **options)
            assert texts_of(chunks) == [choice["message"]["content"]]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            assert chunks[-1]["choices"][0]["stop_reason"] == choice["stop_reason"]


def test_c34_special_tokens_may_be_shown_but_not_the_stop(server: ApiServer) -> None:
    assert server.chat("Hello", skip_special_tokens=False)["choices"][0]["message"]["content"] == "hi<|im_end|>more"
    reply = server.chat("Hello", ignore_eos=True, max_tokens=12)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 12


def test_max_tokens_by_both_names(server: ApiServer) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        [choice] = server.chat("Hello", **{name: 2})["choices"]
        assert choice["message"]["content"] == "hi"
        assert choice["finish_reason"] == "length"


def test_without_max_tokens_the_context_is_the_limit(server: ApiServer) -> None:
    messages = [*user("go"), {"role": "assistant", "content": "Q"}]
    content = server.ok(CHAT, messages=messages, continue_final_message=True, temperature=0)
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["total_tokens"] == 256 + 1


def test_prompt_logprobs(server: ApiServer) -> None:
    content = server.chat("Hello", max_tokens=1, prompt_logprobs=1)
    places = content["prompt_logprobs"]
    assert places[0] is None
    assert len(places) == content["usage"]["prompt_tokens"]
    assert all(1 <= len(place) <= 2 for place in places[1:])


def test_content_in_parts_is_joined(server: ApiServer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = server.ok("/tokenize", messages=user("one\ntwo"))["tokens"]
    assert server.ok("/tokenize", messages=user(parts))["tokens"] == joined


def test_what_the_client_sends_by_default_is_taken(server: ApiServer) -> None:
    content = server.chat(
        "Hello",
        user="me",
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        logit_bias={},
        safety_identifier="me",
        prompt_cache_key="k",
        reasoning_effort=None,
    )
    assert content["service_tier"] == "default"
    assert content["choices"][0]["message"]["content"] == ANSWER


def test_tools_that_may_not_be_called_are_taken(server: ApiServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert server.chat("Hello", tools=[tool], tool_choice="none")["choices"][0]["message"]["content"] == ANSWER
