"""``gapless serve smollm2`` and the clients that people have: ``openai``, ``curl``, and ``gapless``' own Python API."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from served_process import Served, served

from fixtures.tokenizers import smollm2_gguf
from gapless import LLM, SamplingParams

KEY = "sk-a-key-for-this-test"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
OPTIONS = ["smollm2", "--device", "cpu", "--num-blocks", "512", "--max-model-len", "2048", "--port", "0"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    smollm2_gguf()  # skips where the model is not installed
    log = tmp_path_factory.mktemp("serve") / "log"
    with served(log, *OPTIONS, environment={"GAPLESS_API_KEYS": KEY}) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_a_question(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
    answer = chat.choices[0].message.content
    assert answer is not None
    assert "Paris" in answer
    chunks = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    response = client.responses.create(model="smollm2", input=QUESTION, temperature=0, max_output_tokens=24)
    assert response.output_text == answer


def test_without_a_key(server: Served) -> None:
    with (
        OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_the_server_answers_as_the_library_does(client: OpenAI) -> None:
    prompts = ["The three primary colours are", "Water boils at"]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
    with LLM("smollm2", device="cpu", num_blocks=512, max_model_len=2048) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    completion = client.completions.create(model="smollm2", prompt=prompts, temperature=0, max_tokens=12, logprobs=1)
    assert [choice.text for choice in completion.choices] == [output.outputs[0].text for output in expected]
    for choice, output in zip(completion.choices, expected, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        places = output.outputs[0].logprobs
        assert places is not None
        own = [place[token].logprob for token, place in zip(output.outputs[0].token_ids, places, strict=True)]
        assert choice.logprobs.token_logprobs == pytest.approx(own, abs=1e-3)


def curl(server: Served, path: str, *arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60", *arguments]
    command += ["--header", f"Authorization: Bearer {KEY}", f"http://127.0.0.1:{server.port}{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout


def test_curl(server: Served) -> None:
    json_header = ["--header", "Content-Type: application/json"]
    body = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    answer = json.loads(curl(server, "/v1/chat/completions", *json_header, "--data", json.dumps(body)))
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text

    streamed = curl(server, "/v1/chat/completions", *json_header, "--data", json.dumps({**body, "stream": True}))
    lines = [line for line in streamed.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text

    # Without the header curl sends a form, which is told and not guessed.
    refused = json.loads(curl(server, "/v1/completions", "--data", '{"prompt": "x"}'))
    assert "application/json" in refused["error"]["message"]
    assert "smollm2" in curl(server, "/v1/models")
