"""``/v1/completions``: prompts in all forms, echo and scoring, log-probs, several choices."""

import math
import threading
from typing import Any

import pytest
import torch

from fixtures.api_server import EMOJI, ApiServer
from fixtures.checkpoints import f_hist_model
from fixtures.served_models import random_prompts

TEXT = "/v1/completions"
X, Y, Z = -0.407606, -1.407606, -2.407606


def test_a_completion(server: ApiServer) -> None:
    content = server.complete("P")
    assert content["object"] == "text_completion"
    assert content["id"].startswith("cmpl-")
    [choice] = content["choices"]
    assert choice == {"index": 0, "text": "pq", "logprobs": None, "finish_reason": "stop", "stop_reason": None}


@pytest.mark.parametrize("prompt", ["L", [76], ["L"], [[76]]])
def test_all_forms_of_a_prompt(server: ApiServer, prompt: Any) -> None:
    assert server.text(prompt, max_tokens=1) == "x"


def test_several_prompts_and_choices(server: ApiServer) -> None:
    content = server.complete(["L", "P", "E"], n=2)
    assert [choice["index"] for choice in content["choices"]] == list(range(6))
    assert [choice["text"] for choice in content["choices"]] == ["x", "x", "pq", "pq", EMOJI.decode(), EMOJI.decode()]
    assert content["usage"]["prompt_tokens"] == 3
    assert content["usage"]["completion_tokens"] == 2 * (2 + 4 + 5)


@pytest.mark.parametrize("n", [1, 3])
def test_c55_streams_of_several_prompts(server: ApiServer, n: int) -> None:
    options = {"prompt": ["E", "P", "h"], "temperature": 0, "n": n}
    whole = server.ok(TEXT, **options)
    *chunks, last = server.stream(TEXT, **options, stream_options={"include_usage": True})
    texts = [""] * 3 * n
    ends: list[int] = []
    for chunk in chunks:
        assert chunk["usage"] is None
        [choice] = chunk["choices"]
        assert choice["index"] not in ends
        assert "\ufffd" not in choice["text"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"] is not None:
            ends.append(choice["index"])
    assert sorted(ends) == list(range(3 * n))
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] == 3
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert len({chunk["created"] for chunk in [*chunks, last]}) == 1


def test_c28_scoring_a_prompt(server: ApiServer) -> None:
    content = server.complete("Lx", echo=True, max_tokens=0, logprobs=1)
    [choice] = content["choices"]
    assert choice["text"] == "Lx"
    assert choice["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["L", "x"]
    assert logprobs["token_logprobs"] == [None, pytest.approx(X, abs=1e-4)]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"] == [None, {"x": pytest.approx(X, abs=1e-4)}]


def test_c28_echo_with_one_token_more(server: ApiServer) -> None:
    [choice] = server.complete("Lz", echo=True, max_tokens=1, logprobs=1)["choices"]
    assert choice["text"] == "Lz"  # EOS has no text
    assert choice["logprobs"]["tokens"] == ["L", "z", "</s>"]
    assert choice["logprobs"]["token_logprobs"][1] == pytest.approx(Z, abs=1e-4)
    assert set(choice["logprobs"]["top_logprobs"][1]) == {"x", "z"}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_c28_a_stream_that_echoes_equals_the_whole(server: ApiServer, max_tokens: int) -> None:
    options = {"prompt": ["hi", "E"], "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0, "n": 2}
    whole = server.ok(TEXT, **options)["choices"]
    joined: list[dict[str, Any]] = [{"text": "", "lists": {}} for _ in whole]
    for chunk in server.stream(TEXT, **options):
        [choice] = chunk["choices"]
        own = joined[choice["index"]]
        own["text"] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            own["lists"].setdefault(name, []).extend(values)
        own["finish_reason"] = choice["finish_reason"]
    for own, choice in zip(joined, whole, strict=True):
        assert own["text"] == choice["text"]
        assert own["lists"] == choice["logprobs"]
        assert own["finish_reason"] == choice["finish_reason"]


def test_c28_without_echo_nothing_is_generated_either(server: ApiServer) -> None:
    content = server.complete("L", max_tokens=0)
    assert content["choices"][0]["text"] == ""
    assert content["choices"][0]["finish_reason"] == "length"
    assert content["usage"]["completion_tokens"] == 0
    reply = server.post(TEXT, prompt="L", max_tokens=-1)
    assert reply.status == 400
    server.assert_serves()


def test_c28_scores_are_those_of_transformers(hist_server: ApiServer) -> None:
    prompts = random_prompts([40, 33, 17])
    content = hist_server.complete(prompts, echo=True, max_tokens=0, logprobs=1)
    model = f_hist_model(vocab_size=264)
    for prompt, choice in zip(prompts, content["choices"], strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        scores = choice["logprobs"]["token_logprobs"]
        assert scores[0] is None
        for place, token in enumerate(prompt[1:]):
            assert scores[place + 1] == pytest.approx(float(expected[place, token]), abs=1e-3)


@pytest.mark.parametrize("temperature", [0, 0.5, 1, 2])
@pytest.mark.parametrize("top_k", [0, 1])
def test_c26_values_of_the_raw_logits(server: ApiServer, temperature: float, top_k: int) -> None:
    [choice] = server.complete("L", temperature=temperature, top_k=top_k, seed=5, max_tokens=1, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    expected = {"x": X, "y": Y, "z": Z}
    assert logprobs["token_logprobs"] == [pytest.approx(expected[choice["text"]], abs=1e-4)]
    for token, value in logprobs["top_logprobs"][0].items():
        assert value == pytest.approx(expected[token], abs=1e-4)
    assert choice["text"] in logprobs["top_logprobs"][0]


def test_c26_impossible_tokens_have_a_finite_value(server: ApiServer) -> None:
    for stream in (False, True):
        options = {"prompt": "N", "max_tokens": 1, "temperature": 0, "logprobs": 5}
        content = server.stream(TEXT, **options)[0] if stream else server.ok(TEXT, **options)
        [top] = content["choices"][0]["logprobs"]["top_logprobs"]
        assert top.pop("n") == pytest.approx(0.0, abs=1e-6)
        assert set(top.values()) == {-9999.0}


def test_c26_probabilities_add_up(server: ApiServer) -> None:
    [choice] = server.complete("L", max_tokens=1, logprobs=20)["choices"]
    [top] = choice["logprobs"]["top_logprobs"]
    assert sum(math.exp(value) for value in top.values()) == pytest.approx(1.0, abs=1e-5)


def test_c39_an_id_without_a_token(server: ApiServer) -> None:
    content = server.complete(["P"] * 4, logprobs=1)
    assert content["usage"]["completion_tokens"] == 4 * 4
    for choice in content["choices"]:
        assert choice["text"] == "pq"
        assert choice["logprobs"]["tokens"] == ["p", "token_id:300", "q", "</s>"]
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    chunks = server.stream(TEXT, prompt="P", temperature=0, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "pq"
    server.assert_serves()


def test_tokens_that_are_no_text_are_named_by_their_bytes(server: ApiServer) -> None:
    [choice] = server.complete("E", logprobs=0)["choices"]
    assert choice["text"] == EMOJI.decode()
    assert choice["logprobs"]["tokens"] == [*(f"bytes:\\x{byte:02x}" for byte in EMOJI), "</s>"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("temperature", [0, 1e-6, 1e-5, 1e-4])
def test_c18_tiny_temperatures_are_greedy(server: ApiServer, temperature: float) -> None:
    content = server.complete(["L"] * 5, n=10, temperature=temperature, max_tokens=1, logprobs=1)
    assert [choice["text"] for choice in content["choices"]] == ["x"] * 50
    assert all(math.isfinite(choice["logprobs"]["token_logprobs"][0]) for choice in content["choices"])


@pytest.mark.parametrize("value", [-1, -1e-9, float("nan"), float("inf"), float("-inf"), "0", True])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
)
def test_c18_values_that_are_no_temperature(server: ApiServer, name: str, value: Any) -> None:
    if name in ("presence_penalty", "frequency_penalty") and value in (-1, -1e-9):
        assert server.post(TEXT, prompt="L", **{name: value}).status == 200
        return
    if name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "min_p") and value is not True:
        value = value if value != -1e-9 else -3
    reply = server.post(TEXT, prompt="L", **{name: value})
    assert reply.status == 400
    finite = isinstance(value, int | float | str) and value == value and abs(float(value)) != math.inf
    assert reply.error["param"] == (name if finite else None)
    server.assert_serves()


@pytest.mark.parametrize(("top_p", "status"), [(0, 400), (1.5, 400), (1e-4, 200), (1, 200)])
def test_c18_top_p(server: ApiServer, top_p: float, status: int) -> None:
    reply = server.post(TEXT, prompt="L", top_p=top_p, temperature=1, max_tokens=1)
    assert reply.status == status
    if top_p == 1e-4:
        assert reply.content["choices"][0]["text"] == "x"
    server.assert_serves()


@pytest.mark.parametrize(
    ("top_k", "texts"), [(0, "xyz"), (-1, "xyz"), (1, "x"), (2, "xy"), (10**6, "xyz"), (10**18, "xyz")]
)
def test_c20_top_k(server: ApiServer, top_k: int, texts: str) -> None:
    content = server.complete(["L"] * 20, n=100, temperature=1, top_k=top_k, max_tokens=1)
    assert len(content["choices"]) == 2000
    assert {choice["text"] for choice in content["choices"]} == set(texts)


@pytest.mark.parametrize("top_k", [-2, 0.5, 0.01, True, "5"])
def test_c20_values_that_are_no_top_k(server: ApiServer, top_k: Any) -> None:
    reply = server.post(TEXT, prompt="L", top_k=top_k)
    assert reply.status == 400
    assert reply.error["param"] == "top_k"
    server.assert_serves()


BAD_IDS = [-1, 320, 2**31, 2**63, 1.0, True, "x", None]


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("name", ["prompt", "logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_c25_ids_that_are_none(server: ApiServer, name: str, bad: Any) -> None:
    if name == "prompt":
        fields: dict[str, Any] = {"prompt": [76, bad]}
    elif name == "logit_bias":
        fields = {"prompt": "L", name: {str(bad): 1}}
    else:
        fields = {"prompt": "L", name: [76, bad]}
    reply = server.post(TEXT, **fields)
    assert reply.status == 400
    assert reply.error["param"].startswith(name)
    assert reply.error["message"].startswith(name)
    assert bad is None or str(bad) in reply.error["message"].removeprefix(reply.error["param"])
    server.assert_serves()


def test_c25_a_neighbour_feels_nothing_of_refused_requests(server: ApiServer) -> None:
    texts: list[str] = []
    neighbour = threading.Thread(target=lambda: texts.append(server.text("Q", max_tokens=200)))
    neighbour.start()
    while neighbour.is_alive():
        for fields in ({"logit_bias": {"99999": 1}}, {"stop_token_ids": [-1]}, {"allowed_token_ids": [2**40]}):
            assert server.post(TEXT, prompt="L", **fields).status == 400
    assert texts == ["Q" * 200]


@pytest.mark.parametrize("bias", [101, -100.5, "1", None, True])
def test_c25_biases_that_are_none(server: ApiServer, bias: Any) -> None:
    reply = server.post(TEXT, prompt="L", logit_bias={"120": bias})
    assert reply.status == 400
    assert reply.error["param"].startswith("logit_bias")
    server.assert_serves()


def test_c25_biases(server: ApiServer) -> None:
    assert server.text("L", max_tokens=1, logit_bias={str(ord("x")): -100}) == "y"
    assert server.text("L", max_tokens=1, logit_bias={str(ord("z")): 100}) == "z"
    assert server.text("L", max_tokens=1, allowed_token_ids=[ord("z"), ord("y")]) == "y"
    assert server.text("L", max_tokens=1, bad_words=["x", "y"]) == "z"


def test_sampling_options_reach_the_engine(server: ApiServer) -> None:
    assert server.text("h", stop=["m"], include_stop_str_in_output=True) == "im"
    assert server.complete("h", min_tokens=3, stop=["i"])["choices"][0]["text"] == "imore"
    assert server.text("h", max_tokens=3, ignore_eos=True) == "im"
    first = server.text(["L"], temperature=2, seed=11, max_tokens=1, n=1)
    assert all(server.text(["L"], temperature=2, seed=11, max_tokens=1) == first for _ in range(5))
