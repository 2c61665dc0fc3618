"""The commands, called in this process on a small random model."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import gapless
from fixtures.served_models import chain, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import EngineConfig, SamplingParams
from gapless.cli.main import app, main

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--num-blocks", "64"]
TINY += ["--max-model-len", "512"]
SHORT = ["--max-tokens", "4", "--ignore-eos"]


def call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, arguments, input=given)


def last_line(result: Result) -> str:
    return result.stderr.strip().splitlines()[-1]


def test_version_and_help() -> None:
    assert call("--version").stdout == f"gapless {gapless.__version__}\n"
    shown = call("--help").stdout
    assert all(command in shown for command in ("generate", "chat", "doctor"))


def test_help_needs_no_torch() -> None:
    code = "import sys, gapless.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_option_of_engine_and_sampling_is_there(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    flags = {word.rstrip(",") for word in shown.split() if word.startswith("--")}
    flags = {flag for word in flags for flag in word.split("/")}
    renamed = {"step_timeout_s": "step-timeout", "stop_token_ids": "stop-token-id"}
    # What a terminal shows no result of, or what has no short form; a line of --input may have it. The timeline has a
    # command of its own.
    left_out = {"detokenize", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "timeline"}
    left_out |= {"n"} if command == "chat" else set()
    for name in [*EngineConfig.__dataclass_fields__, *SamplingParams.__dataclass_fields__]:
        if name not in left_out:
            assert "--" + renamed.get(name, name.replace("_", "-")) in flags
    assert "--weights-seed" in flags, "the engine's seed, since --seed is sampling's"


def test_answers_go_to_stdout_and_the_rest_to_stderr() -> None:
    one = call("generate", *TINY, *SHORT, "--raw", "hello")
    assert one.exit_code == 0
    closing = last_line(one)
    assert closing.startswith("1 request, 4 tokens, ")
    assert all(part in closing for part in ("tokens/s", "median TTFT", "median TPOT", "device active"))
    assert "max_model_len: 512" in one.stderr
    assert "draw random weights" in one.stderr
    several = call("generate", *TINY, *SHORT, "--raw", "--quiet", "hello", "bye")
    assert several.stderr == ""
    assert several.stdout.startswith(f"> hello\n{one.stdout}\n> bye\n")


def test_the_log_is_left_as_it_was() -> None:
    before = list(logging.getLogger("gapless").handlers)
    call("generate", *TINY, *SHORT, "x")
    assert logging.getLogger("gapless").handlers == before


def test_jsonl_in_and_out(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt": "hello", "max_tokens": 2, "id": "short", "seed": None},
        {"prompt_token_ids": [104, 105]},
        {"messages": [{"role": "user", "content": "hello"}]},
    ]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    result = call("generate", *TINY, *SHORT, "--input", str(tmp_path / "in.jsonl"), "--output", str(out))
    assert result.exit_code == 0
    assert result.stdout == ""
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [len(answer["token_ids"]) for answer in answers] == [4, 2, 4, 4]
    assert answers[0]["token_ids"][:2] == answers[1]["token_ids"]
    assert answers[0]["token_ids"] == answers[3]["token_ids"], "a prompt is a user's message where there is a template"
    assert answers[1]["id"] == "short"
    assert answers[2]["prompt_token_ids"] == [104, 105]
    assert answers[2]["num_prompt_tokens"] == 2
    assert {answer["finish_reason"] for answer in answers} == {"length"}
    assert all(answer["ttft_s"] > 0 for answer in answers)
    assert not list(tmp_path.glob("*.part"))


def test_raw_prompts_are_continued_as_they_are() -> None:
    raw = json.loads(call("generate", *TINY, *SHORT, "--raw", "--json", "hello").stdout)
    chat = json.loads(call("generate", *TINY, *SHORT, "--json", "hello").stdout)
    assert raw["num_prompt_tokens"] == 5
    assert chat["num_prompt_tokens"] > 5


def test_standard_input_has_a_prompt_a_line() -> None:
    result = call("generate", *TINY, *SHORT, "--json", given="hello\n\nbye\n")
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["hello", "bye"]
    result = call("generate", *TINY, *SHORT, "--json", "--input", "-", given='{"prompt": "hello"}\n')
    assert json.loads(result.stdout)["prompt"] == "hello"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", "is not JSON"),
        ("[1]", "must be an object"),
        ("{}", "has 0 of prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "messages": []}', "has 2 of prompt, messages, prompt_token_ids"),
        ('{"prompt": "a", "temprature": 1}', "has the unknown key 'temprature'"),
        ('{"prompt": "a", "temperature": -1}', "temperature=-1 must be 0"),
        ('{"messages": [{"role": "me", "content": "a"}]}', r"messages[0].role='me' is unknown"),
        ('{"prompt_token_ids": [-1]}', "prompt_token_ids[0]=-1 is not in the vocabulary"),
        ('{"prompt_token_ids": [' + "1," * 600 + "1]}", "the prompt has 601 tokens"),
    ],
)
def test_a_bad_line_is_named_and_nothing_runs(line: str, message: str) -> None:
    result = call("generate", *TINY, "--input", "-", given='{"prompt": "good"}\n' + line + "\n")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert last_line(result).startswith("error: standard input:2")
    assert message in last_line(result)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--depth", "0", "x"], 2, "error: depth=0 must be an integer of at least 1"),
        (["--temperature", "-1", "x"], 2, "error: temperature=-1.0 must be 0 (greedy) or positive"),
        (["--dtype", "int4", "x"], 2, "error: dtype='int4' is unknown; use one of auto, float32, bfloat16, float16"),
        (["--input", "there", "x"], 2, "error: prompts were given and --input too: use one of them"),
        (["--output", "no/such/folder/x", "x"], 2, "error: --output no/such/folder/x: there is no folder"),
        (["--input", "no-such-file"], 1, "error: [Errno 2] No such file or directory: 'no-such-file'"),
        (["--model", "no/such/model/", "x"], 1, "error: no/such/model/ does not exist"),
        (["--model", "tiny-llama", "--load-format", "auto", "x"], 1, "error: 'tiny-llama' is a preset without weights"),
        (["--device", "cuda:7", "x"], 2, "error: device='cuda:7' is unknown"),
        (["--max-model-len", "100000", "x"], 1, "error: max_model_len=100000 must be in [1, 2048]"),
    ],
)
def test_a_failure_is_one_line_at_the_end(arguments: list[str], code: int, message: str) -> None:
    result = call("generate", *TINY, *arguments)
    assert result.exit_code == code
    assert last_line(result).startswith(message)
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_verbose_shows_the_traceback_and_an_unknown_option_is_wrong_use() -> None:
    result = call("generate", *TINY, "--model", "no/such/model/", "--verbose", "x")
    assert "Traceback" in result.stderr
    assert last_line(result).startswith("error: ")
    assert call("generate", "--dept", "3", "x").exit_code == 2


def test_a_failure_of_ours_says_how_to_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*arguments: Any) -> None:
        raise ArithmeticError("made\nup")

    monkeypatch.setattr("gapless.text.byte_tokenizer.ByteTokenizer.rendered_chat", breaks)
    result = call("generate", *TINY, "x")
    assert result.exit_code == 1
    assert last_line(result) == "error: ArithmeticError: made up (--verbose shows where)"


def test_a_failed_request_is_a_failure_that_keeps_the_others_answers(tmp_path: Path) -> None:
    table_checkpoint(tmp_path, chain("a", "b", BYTE_EOS), nan_tokens=[ord("N")])
    result = call("generate", "--model", str(tmp_path), "--num-blocks", "64", "--raw", "--json", "a", "N")
    assert result.exit_code == 1
    good, bad = (json.loads(line) for line in result.stdout.splitlines())
    assert good["text"] == "b"
    assert good["error"] is None
    assert "not finite" in bad["error"]
    assert last_line(result).startswith("error: 1 of 2 requests failed: the model's logits")


def test_a_chat_template_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "short.jinja").write_text("Q{{ messages[0]['content'] }}")
    result = call(
        "generate", *TINY, *SHORT, "--json", "--chat-template", str(tmp_path / "short.jinja"), "--chat", "hello"
    )
    assert json.loads(result.stdout)["num_prompt_tokens"] == 6


def test_chat_through_a_pipe() -> None:
    greedy = [*TINY, *SHORT, "--temperature", "0"]
    once = call("chat", *greedy, given="hi\n")
    assert len(once.stdout) > 1
    result = call("chat", *greedy, given="hi\n/reset\nhi\n\n/what\n/exit\nnever\n")
    assert result.exit_code == 0
    assert result.stdout == once.stdout * 2, "after /reset the talk starts anew"
    assert "the talk starts anew" in result.stderr
    assert "/what is no command" in result.stderr
    assert "cut after 4 tokens" in result.stderr


def test_chat_goes_on_after_a_message_that_is_too_long() -> None:
    result = call("chat", *TINY, *SHORT, "--temperature", "0", given="x" * 600 + "\nhi\n")
    assert result.exit_code == 0
    assert "shorten it" in result.stderr
    alone = call("chat", *TINY, *SHORT, "--temperature", "0", given="hi\n")
    assert result.stdout == alone.stdout != "", "the second message is answered, and nothing of the first is left"


def test_chat_forgets_the_oldest_and_says_so() -> None:
    result = call("chat", *TINY, *SHORT, given=("x" * 150 + "\n") * 4)
    assert result.exit_code == 0
    assert "the context of 512 tokens is full: the oldest 2 messages are forgotten" in result.stderr


def test_doctor_tries_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("doctor")
    assert result.exit_code == 0
    for word in ("packages", "torch ", "CPU", "memory", "CUDA", "attention", "smollm2", "tiny-llama"):
        assert word in result.stdout
    assert "try cpu     works: 16 tokens" in result.stdout

    def breaks(*arguments: Any) -> None:
        raise ArithmeticError("made up")

    monkeypatch.setattr("gapless.model.decoder.DecoderModel.init_dummy", breaks)
    broken = call("doctor")
    assert broken.exit_code == 1
    assert "FAILED: ArithmeticError: made up" in broken.stdout
    assert last_line(broken).startswith("error: cpu")


def test_main_leaves_with_130_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    interval = sys.getswitchinterval()
    monkeypatch.setattr("gapless.cli.main.app", interrupted)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.setswitchinterval(interval)
    assert ended.value.code == 130
