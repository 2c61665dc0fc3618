"""Options of ``gapless serve`` that change what clients see, on a real process: names, template, defaults, origins.

And ``curl`` against it, as people try a server first.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from e2e.served_process import Served, served
from fixtures.served_models import ROW_L, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, CHATML

ORIGIN = "https://app.example"
JSON = ["--header", "Content-Type: application/json"]
# Not the model's own, which is ChatML; its newline leads to the answer.
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}{{ tail }}{{ '\n' }}"
MESSAGES = [{"role": "user", "content": "Hello"}]
ANSWER = "hi more"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The model's file says three tokens, the likeliest one always, and ChatML; the operator says otherwise."""
    folder = table_checkpoint(
        tmp_path_factory.mktemp("model"),
        chain("\n", *ANSWER, BYTE_EOS),
        chain("Q", "Q"),
        rows(L=ROW_L),
        chat_template=CHATML,
    )
    defaults = folder / "generation_config.json"
    defaults.write_text(json.dumps({**json.loads(defaults.read_text()), "max_new_tokens": 3, "top_k": 1}))
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    names = ["--served-model-name", "first", "--served-model-name", "org/second"]
    sampling = ["--generation-config", "none", "--override-generation-config", '{"top_k": 2, "temperature": 1.5}']
    options = [*names, *sampling, "--chat-template", str(template), "--cors-origin", ORIGIN]
    log = tmp_path_factory.mktemp("log") / "log"
    with served(log, str(folder), "--device", "cpu", "--num-blocks", "128", "--port", "0", *options) as process:
        process.wait_until_ready()
        yield process


def curl(server: Served, path: str, *arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60", *arguments]
    command.append(f"http://127.0.0.1:{server.port}{path}")
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout


def complete(server: Served, **fields: Any) -> Any:
    status, content = server.ask("POST", "/v1/completions", fields)
    assert status == 200, content
    return content


def test_every_name_is_the_model(server: Served) -> None:
    models = server.ask("GET", "/v1/models")[1]
    assert [model["id"] for model in models["data"]] == ["first", "org/second"]
    for name in ("first", "org/second"):
        assert server.ask("GET", f"/v1/models/{name}") == (200, next(m for m in models["data"] if m["id"] == name))
        assert complete(server, model=name, prompt="\n", temperature=0)["model"] == name
    assert complete(server, prompt="\n", temperature=0)["model"] == "first"
    for other in ("third", "First", ""):
        status, content = server.ask("POST", "/v1/completions", {"model": other, "prompt": "\n"})
        assert (status, content["error"]["code"]) == (404, "model_not_found")


def test_c36_the_operators_template(server: Served) -> None:
    def ids(**fields: Any) -> bytes:
        status, content = server.ask("POST", "/tokenize", {"messages": MESSAGES, **fields})
        assert status == 200, content
        return bytes(content["tokens"])

    assert ids() == b"[user]Hello\n"
    assert ids(chat_template_kwargs={"tail": "!"}) == b"[user]Hello!\n"
    status, chat = server.ask("POST", "/v1/chat/completions", {"messages": MESSAGES, "temperature": 0})
    assert status == 200
    assert chat["choices"][0]["message"]["content"] == ANSWER
    assert chat["usage"]["prompt_tokens"] == len("[user]Hello\n")
    status, refused = server.ask("POST", "/v1/chat/completions", {"messages": MESSAGES, "chat_template": CHATML})
    assert (status, refused["error"]["param"]) == (400, "chat_template")


def test_c59_the_operators_defaults_and_not_the_files(server: Served) -> None:
    def texts(**fields: Any) -> set[str]:
        return {choice["text"] for choice in complete(server, prompt="L", n=100, max_tokens=1, **fields)["choices"]}

    assert texts() == {"x", "y"}
    assert texts(top_k=0) == {"x", "y", "z"}
    assert texts(temperature=0) == {"x"}
    assert complete(server, prompt="Q", temperature=0)["usage"]["completion_tokens"] == 16
    status, response = server.ask("POST", "/v1/responses", {"input": "Hello"})
    assert (status, response["temperature"]) == (200, 1.5)


def test_web_pages_of_the_origin_may_call(server: Served) -> None:
    def allowed(method: str, origin: str, **headers: str) -> str | None:
        with closing(server.connect()) as connection:
            connection.request(method, "/v1/models", headers={"Origin": origin, **headers})
            with connection.getresponse() as answer:
                answer.read()
                return answer.headers.get("access-control-allow-origin")

    preflight = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert allowed("GET", ORIGIN) == ORIGIN
    assert allowed("OPTIONS", ORIGIN, **preflight) == ORIGIN
    for stranger in ("https://evil.example", "http://app.example", ORIGIN + ".evil.example", "null"):
        assert allowed("GET", stranger) is None
        assert allowed("OPTIONS", stranger, **preflight) is None


def test_curl(server: Served) -> None:
    body = {"model": "first", "messages": MESSAGES, "temperature": 0}
    answer = json.loads(curl(server, "/v1/chat/completions", *JSON, "--data", json.dumps(body)))
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["choices"][0]["finish_reason"] == "stop"

    streamed = curl(server, "/v1/chat/completions", *JSON, "--data", json.dumps({**body, "stream": True}))
    lines = [line for line in streamed.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER

    completion = json.loads(curl(server, "/v1/completions", "--json", '{"prompt": "\\n", "temperature": 0}'))
    assert completion["choices"][0]["text"] == ANSWER
    response = json.loads(curl(server, "/v1/responses", "--json", '{"input": "Hello", "temperature": 0}'))
    assert response["output"][0]["content"][0]["text"] == ANSWER
    assert [model["id"] for model in json.loads(curl(server, "/v1/models"))["data"]] == ["first", "org/second"]
    assert json.loads(curl(server, "/health")) == {"status": "ok"}


def test_curl_with_mistakes(server: Served) -> None:
    # Without the header curl sends a form, which is told and not guessed.
    refused = json.loads(curl(server, "/v1/completions", "--data", '{"prompt": "x"}'))
    assert "application/json" in refused["error"]["message"]
    status = ["--write-out", "\n%{http_code}"]
    for body, code in (('{"prompt": ', "400"), ('{"prompt": "x", "temprature": 1}', "400"), ("[]", "400")):
        text, _, told = curl(server, "/v1/completions", "--json", body, *status).rpartition("\n")
        assert told == code
        assert set(json.loads(text)) == {"error"}
    text, _, told = curl(server, "/v1/completions", *status).rpartition("\n")
    assert (told, json.loads(text)["error"]["code"]) == ("405", "method_not_allowed")


def test_c41_a_body_of_20_megabytes_is_refused_beside_a_stream(server: Served, tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"prompt": "x" * 20_000_000}))
    with server.stream(400, prompt="Q") as stream:
        for extra in ([], ["--header", "Transfer-Encoding: chunked"]):
            told = curl(
                server, "/v1/completions", *JSON, "--data-binary", f"@{body}", *extra, "--write-out", "\n%{http_code}"
            )
            assert told.endswith("\n413")
            assert json.loads(told.rpartition("\n")[0])["error"]["message"]
        text = stream.read().decode()
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Q" * 400
    assert text.endswith("data: [DONE]\n\n")
