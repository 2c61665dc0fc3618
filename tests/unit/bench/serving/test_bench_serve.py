"""``gapless bench serve`` against a server that speaks the API over a real socket."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gapless.cli.main import app
from unit.bench.serving.speaking_server import (
    Answer,
    Received,
    answer_models,
    chat_chunk,
    serving_in_a_thread,
    text_chunk,
    usage_chunk,
)


async def healthy(request: Received, answer: Answer) -> None:
    """Streams as many tokens as were asked for."""
    if await answer_models(request, answer):
        return
    asked = request.json
    await answer.begin_stream()
    for index in range(asked["max_tokens"]):
        await answer.event(chat_chunk("x") if "messages" in asked else text_chunk(f"{index} "))
    await answer.event(usage_chunk(33, asked["max_tokens"]))
    await answer.event("[DONE]")
    await answer.end_stream()


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments], env={"OPENAI_API_KEY": ""})


def last_line(result: Result) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_a_sweep_of_concurrency_writes_table_file_and_picture(tmp_path: Path) -> None:
    report, picture = tmp_path / "r.json", tmp_path / "r.svg"
    with serving_in_a_thread(healthy) as server:
        options = ["--url", server.url, "--concurrency", "1", "4", "--requests", "6", "--new-tokens", "5"]
        options += ["--prompt-tokens", "8", "--ttft-slo", "10000", "--itl-slo", "10000", "--warm-up", "1"]
        done = call(*options, "--json", str(report), "--picture", str(picture))
        sent = [request for request in server.received if request.method == "POST"]
    assert done.exit_code == 0, done.stderr
    assert len(sent) == 1 + 2 * 6
    assert {request.path for request in sent} == {"/v1/completions"}
    assert all(request.json["model"] == "the-model" for request in sent)
    assert len({request.body for request in sent}) == len(sent), "no prompt is sent twice"
    assert "6/6" in done.stdout
    assert "(100%)" in done.stdout
    written = json.loads(report.read_text())
    assert written["model"] == "the-model"
    assert [(level["kind"], level["value"]) for level in written["levels"]] == [("concurrency", 1), ("concurrency", 4)]
    for level in written["levels"]:
        assert (level["completed"], level["output_tokens"], level["prompt_tokens"]) == (6, 30, 6 * 33)
        assert level["good_share"] == 1.0
        assert len(level["records"]) == 6
        assert level["ttft"]["p50_s"] <= level["end_to_end"]["p50_s"]
    drawn = picture.read_text()
    assert all(word in drawn for word in ("Throughput", "Time to first token", "Time between tokens", "Goodput"))


@pytest.mark.parametrize("key", [["--api-key", "sk-secret"], ["--api-key=sk-secret"]])
def test_a_report_does_not_tell_the_key(key: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "r.json"
    with serving_in_a_thread(healthy) as server:
        options = ["--url", server.url, "--concurrency", "1", "--requests", "1", "--new-tokens", "2", *key]
        options += ["--json", str(report)]
        monkeypatch.setattr("sys.argv", ["/somewhere/gapless", "bench", "serve", *options])
        done = call(*options)
        assert all(request.headers["authorization"] == "Bearer sk-secret" for request in server.received)
    assert done.exit_code == 0, done.stderr
    assert "sk-secret" not in report.read_text()
    command = json.loads(report.read_text())["environment"]["command"]
    assert command.startswith(f"gapless bench serve --url {server.url} ")
    assert "--api-key" in command


def test_a_rate_with_prompts_of_a_file_goes_to_chat(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}\n')
    picture = tmp_path / "r.png"
    with serving_in_a_thread(healthy) as server:
        options = ["--url", f"{server.url}/v1", "--rate", "300", "--requests", "5", "--endpoint", "chat"]
        options += ["--input", str(prompts), "--model", "mine", "--api-key", "secret", "--picture", str(picture)]
        done = call(*options)
        received = server.received
    assert done.exit_code == 0, done.stderr
    assert {request.path for request in received} == {"/v1/chat/completions"}, "the model was named: nobody asks for it"
    assert all(request.headers["authorization"] == "Bearer secret" for request in received)
    assert all(request.json["model"] == "mine" for request in received)
    assert "300/s" in done.stdout
    assert "5/5" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_not_there_is_one_clear_line() -> None:
    with serving_in_a_thread(healthy) as server:
        url = server.url
    for model in ([], ["--model", "m"]):
        done = call("--url", url, "--rate", "1", *model)
        assert done.exit_code == 1
        assert last_line(done).startswith(f"error: cannot connect to {url}/v1: ")
        assert last_line(done).endswith("is the server running?")


def test_a_server_that_fails_the_warm_up_is_not_measured() -> None:
    async def refusing(request: Received, answer: Answer) -> None:
        if not await answer_models(request, answer):
            await answer.whole(400, {"error": {"message": "ignore_eos is unknown"}})

    with serving_in_a_thread(refusing) as server:
        done = call("--url", server.url, "--concurrency", "4")
        assert len(server.received) == 3, "the models and the two requests of the warm-up"
    assert done.exit_code == 1
    assert last_line(done).endswith("failed the warm-up with HTTP 400: ignore_eos is unknown")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {"error": {"message": "no key"}}, "HTTP 401: no key; check --url, give the key with --api-key"),
        (404, b"<html>", "HTTP 404: <html>"),
        (200, {"data": []}, "lists no model: name it with --model"),
        (200, b"hello", "lists no model"),
    ],
)
def test_a_server_without_models_says_what_to_do(status: int, body: object, message: str) -> None:
    async def handler(request: Received, answer: Answer) -> None:
        await answer.whole(status, body)

    with serving_in_a_thread(handler) as server:
        done = call("--url", server.url, "--rate", "1")
    assert done.exit_code == 1
    assert message in last_line(done)


def test_failures_in_a_level_are_told_and_all_of_them_are_an_error() -> None:
    async def handler(request: Received, answer: Answer) -> None:
        if await answer_models(request, answer):
            return
        await answer.whole(503, {"error": {"message": "too many"}})

    with serving_in_a_thread(handler) as server:
        options = ["--url", server.url, "--concurrency", "2", "--requests", "4", "--warm-up", "0"]
        done = call(*options)
    assert done.exit_code == 1
    assert "2: 4 of 4 failed: HTTP 503" in done.stdout
    assert last_line(done) == "error: no request was answered: too many"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give levels of load by --rate or by --concurrency"),
        (["--rate", "1", "--concurrency", "1"], "not by both"),
        (["--rate", "-2"], "rate=-2.0 must be a positive number"),
        (["--rate", "1", "--url", "localhost:8000"], "url='localhost:8000' names no server"),
        (["--rate", "1", "--ttft-slo", "0"], "ttft-slo=0.0 must be a positive time"),
        (["--rate", "1", "--picture", "x.txt"], "must end in .png or .svg"),
        (["--rate", "1", "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
        (["--rate", "1", "--input", "/nowhere.jsonl"], "No such file or directory: '/nowhere.jsonl'"),
    ],
)
def test_wrong_options_are_wrong_use(arguments: list[str], message: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert message in last_line(done)
