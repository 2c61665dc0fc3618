"""Log-probs as clients get them: the sampled token's own, finite, the same whole and streamed; scoring runs no decode
step."""

from typing import Any

import pytest

from fixtures.api_server import ApiServer, sse_events, strict_json

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
X, Y, Z = -0.407606, -1.407606, -2.407606
FLOOR = -9999.0

# How the third of ROW-L's tokens is made to come.
FORCED = {
    "bias": {"temperature": 0, "logit_bias": {str(ord("z")): 100}},
    "allowed": {"temperature": 0, "allowed_token_ids": [ord("z")]},
    "both and a draw": {"temperature": 2, "logit_bias": {str(ord("z")): 100}, "top_k": 1, "seed": 1},
    "bad words": {"temperature": 0.5, "bad_words": ["x", "y"], "seed": 1},
}


def completion_entry(server: ApiServer, prompt: str, stream: bool, num_top: int, **options: Any) -> dict[str, Any]:
    """The only token of a completion: its text, its log-prob and the most likely ones'."""
    fields = {"prompt": prompt, "max_tokens": 1, "logprobs": num_top, **options}
    contents = server.stream(TEXT, **fields) if stream else [server.ok(TEXT, **fields)]
    [logprobs] = [found for content in contents if (found := content["choices"][0]["logprobs"]) is not None]
    assert "".join(content["choices"][0]["text"] for content in contents) == logprobs["tokens"][0]
    assert [len(values) for values in logprobs.values()] == [1] * 4
    [top] = logprobs["top_logprobs"]
    return {"token": logprobs["tokens"][0], "logprob": logprobs["token_logprobs"][0], "top": top}


def chat_entry(server: ApiServer, prompt: str, stream: bool, num_top: int, **options: Any) -> dict[str, Any]:
    """The same of a chat that goes on with ``prompt``; the most likely ones as a mapping."""
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": prompt}]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 1, "logprobs": True, **options}
    fields["top_logprobs"] = num_top
    if stream:
        news = [chunk["choices"][0] for chunk in server.stream(CHAT, **fields)]
        text = "".join(each["delta"].get("content", "") for each in news)
        entries = [entry for each in news if each["logprobs"] is not None for entry in each["logprobs"]["content"]]
    else:
        [choice] = server.ok(CHAT, **fields)["choices"]
        text, entries = choice["message"]["content"], choice["logprobs"]["content"]
    return _only(text, entries)


def _only(text: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    [entry] = entries
    assert text == entry["token"]
    assert bytes(entry["bytes"]).decode() == entry["token"]
    top = {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
    assert list(top.values()) == sorted(top.values(), reverse=True)
    return {"token": entry["token"], "logprob": entry["logprob"], "top": top}


def entry_of(server: ApiServer, path: str, prompt: str, stream: bool, num_top: int, **options: Any) -> dict[str, Any]:
    make = completion_entry if path == TEXT else chat_entry
    return make(server, prompt, stream, num_top, **options)


@pytest.mark.parametrize("how", FORCED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_c26_the_sampled_token_outside_the_most_likely_ones(
    server: ApiServer, path: str, stream: bool, how: str
) -> None:
    for num_top, likely in ((0, {}), (1, {"x": X}), (2, {"x": X, "y": Y}), (3, {"x": X, "y": Y, "z": Z})):
        entry = entry_of(server, path, "L", stream, num_top, **FORCED[how])
        # A mapping of a completion holds the sampled token in any case, as those of OpenAI do.
        expected = {**likely, "z": Z} if path == TEXT else likely
        assert entry["token"] == "z"
        assert entry["logprob"] == pytest.approx(Z, abs=1e-4)
        assert entry["top"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_c26_impossible_tokens_whether_sampled_or_not(server: ApiServer, path: str, stream: bool) -> None:
    """Strictly parsed: JSON has no infinity."""
    likely = entry_of(server, path, "N", stream, 5, temperature=0)
    assert likely["token"] == "n"
    assert likely["logprob"] == pytest.approx(0.0, abs=1e-6)
    assert sorted(likely["top"].values()) == [FLOOR] * 4 + [pytest.approx(0.0, abs=1e-6)]
    forced = entry_of(server, path, "N", stream, 1, temperature=0, allowed_token_ids=[ord("x")])
    assert (forced["token"], forced["logprob"]) == ("x", FLOOR)
    assert forced["top"]["n"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_c26_responses_have_the_sampled_tokens_log_prob(server: ApiServer, stream: bool) -> None:
    fields = {
        "input": "Hello",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
        "max_output_tokens": 1,
        "temperature": 0,
        "allowed_token_ids": [ord("w")],
    }
    if stream:
        events = [strict_json(data) for _, data in sse_events(server.post(RESPONSES, stream=True, **fields).raw)]
        [delta] = [event for event in events if event["type"] == "response.output_text.delta"]
        entry = _only(delta["delta"], delta["logprobs"])
    else:
        [message] = server.ok(RESPONSES, **fields)["output"]
        [part] = message["content"]
        entry = _only(part["text"], part["logprobs"])
    assert entry["token"] == "w"
    assert entry["logprob"] == pytest.approx(-35.0, abs=1e-3)  # 5 for the likely one, -30 for each other
    assert entry["top"] == {"h": pytest.approx(0.0, abs=1e-3)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_c26_entry_i_belongs_to_token_i(server: ApiServer, path: str, stream: bool) -> None:
    """Each of ``hi<|im_end|>more</s>`` is certain, and another one is where a bias takes it off its place."""
    options = {"temperature": 0, "logit_bias": {str(ord("r")): -100}, "max_tokens": 8}
    if path == TEXT:
        fields = {"prompt": "\n", "logprobs": 1, **options}
        contents = server.stream(TEXT, **fields) if stream else [server.ok(TEXT, **fields)]
        parts = [found for each in contents if (found := each["choices"][0]["logprobs"]) is not None]
        tokens = [token for part in parts for token in part["tokens"]]
        values = [value for part in parts for value in part["token_logprobs"]]
    else:
        fields = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, **options}
        contents = server.stream(CHAT, **fields) if stream else [server.ok(CHAT, **fields)]
        found = [each["choices"][0]["logprobs"] for each in contents]
        entries = [entry for each in found if each is not None for entry in each["content"]]
        tokens = [entry["token"] for entry in entries]
        values = [entry["logprob"] for entry in entries]
        assert all(entry["top_logprobs"] == [] for entry in entries)
    assert tokens[:5] == ["h", "i", "<|im_end|>", "m", "o"]
    assert len(tokens) == len(values) == 8
    assert values[:5] == pytest.approx([0.0] * 5, abs=1e-3)
    assert values[5] == pytest.approx(-35.0, abs=1e-3)


# --- scoring ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": "Lx", "echo": True, "logprobs": 1, "max_tokens": 0}),
        (TEXT, {"prompt": "Lx", "echo": True, "max_tokens": 0}),
        (TEXT, {"prompt": "Lx", "max_tokens": 0}),
        (CHAT, {"messages": [{"role": "user", "content": "Lx"}], "max_tokens": 0}),
        (RESPONSES, {"input": "Lx", "max_output_tokens": 0}),
    ],
)
def test_c28_scoring_runs_one_prefill_and_no_decode_step(
    server: ApiServer, path: str, fields: dict[str, Any], stream: bool
) -> None:
    assert server.wait_until_idle()
    before = server.counters()
    reply = server.post(path, stream=stream, **fields)
    assert reply.status == 200
    assert server.wait_until_idle()
    after = server.counters()
    assert after.steps - before.steps == 1
    assert after.output_tokens == before.output_tokens


def test_c28_one_token_more_is_one_token_more(server: ApiServer) -> None:
    assert server.wait_until_idle()
    before = server.counters()
    content = server.complete("Lx", echo=True, logprobs=1, max_tokens=1)
    assert server.wait_until_idle()
    assert len(content["choices"][0]["logprobs"]["tokens"]) == 3
    assert content["usage"]["completion_tokens"] == server.counters().output_tokens - before.output_tokens == 1
    assert server.counters().steps - before.steps == 1, "the prefill samples"


def test_c28_a_prompt_of_several_chunks(hist_server: ApiServer) -> None:
    """40 tokens in chunks of 16 are three steps, each of which only reads the prompt."""
    assert hist_server.wait_until_idle()
    before = hist_server.counters()
    content = hist_server.complete(list(range(40)), echo=True, logprobs=0, max_tokens=0)
    assert hist_server.wait_until_idle()
    after = hist_server.counters()
    assert (after.steps - before.steps, after.output_tokens - before.output_tokens) == (3, 0)
    [choice] = content["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["logprobs"]["token_logprobs"]) == content["usage"]["prompt_tokens"] == 40
    assert content["usage"]["completion_tokens"] == 0
