"""``gapless serve smollm2`` and the clients that people have: ``openai``, ``curl``, and ``gapless``' own Python API."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from served_process import Served, served
from transformers import AutoTokenizer

from fixtures.tokenizers import smollm2_gguf
from gapless import LLM, SamplingParams

KEY = "sk-a-key-for-this-test"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWERED: list[Any] = [{"role": "assistant", "content": "Paris, é "}, {"role": "user", "content": " And of Italy?"}]
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


def test_c35_a_chat_has_the_ids_of_transformers(server: Served) -> None:
    """By the model's own template, which adds a system message where there is none."""
    path = smollm2_gguf()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    for messages in (QUESTION, [{"role": "system", "content": "Be kind."}, *QUESTION, *ANSWERED]):
        for add in (True, False):
            ids = theirs.apply_chat_template(messages, add_generation_prompt=add, return_dict=False)
            rendered = theirs.apply_chat_template(messages, add_generation_prompt=add, tokenize=False)
            chat = {"messages": messages, "add_generation_prompt": add}
            assert ask(server, "/tokenize", **chat)["tokens"] == ids
            assert ask(server, "/tokenize", prompt=rendered)["tokens"] == ids
            answer = ask(server, "/v1/chat/completions", **chat, max_tokens=1, prompt_logprobs=0)
            assert answer["usage"]["prompt_tokens"] == len(ids)
            # The prompt that the engine has seen: the first token has no log-prob.
            seen = [int(token) for place in answer["prompt_logprobs"][1:] for token in place]
            assert seen == ids[1:]
            assert ask(server, "/v1/completions", prompt=rendered, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)


def ask(server: Served, path: str, **fields: Any) -> Any:
    status, content = server.ask("POST", path, fields, Authorization=f"Bearer {KEY}")
    assert status == 200, content
    return content


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
