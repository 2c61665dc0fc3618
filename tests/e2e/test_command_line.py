"""The ``gapless`` command as a user runs it: a process, with files, pipes, a terminal and Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from e2e.served_process import GAPLESS
from fixtures.tokenizers import smollm2_gguf

ROOT = Path(__file__).parents[2]
SMOLLM2 = ["--model", "smollm2", "--device", "cpu", "--num-blocks", "200"]
TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--num-blocks", "64"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TERM": "dumb"}


def run(*arguments: str, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*GAPLESS, *arguments], input=given, capture_output=True, text=True, timeout=200, env=ENVIRONMENT, check=False
    )


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*GAPLESS, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def interrupt_after(process: "subprocess.Popen[str]", words: str) -> str:
    """Send Ctrl-C when a line of standard error holds the words; return all that was written there."""
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if words in line:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            break
    began_s = time.monotonic()
    with process:
        seen += process.stderr.read()
        process.wait(timeout=60)
    assert time.monotonic() - began_s < 30
    return seen


def test_the_demo_answers_with_paris() -> None:
    smollm2_gguf()
    prompts = str(ROOT / "examples" / "prompts.jsonl")
    ended = run("generate", *SMOLLM2, "--input", prompts, "--temperature", "0", "--max-tokens", "64")
    assert ended.returncode == 0, ended.stderr
    assert "The capital of France is Paris." in ended.stdout
    assert re.search(r"\d+ tokens?, [\d.,]+ tokens/s, median TTFT .* ms, .*device active \d+%", ended.stderr)


def test_a_prompt_and_a_file_give_the_same_answer(tmp_path: Path) -> None:
    smollm2_gguf()
    question = "What is the capital of France?"
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": question}]}) + "\n" + json.dumps({"prompt": question})
    )
    ended = run("generate", *SMOLLM2, "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["text"] for answer in answers] == ["The capital of France is Paris."] * 2
    direct = run("generate", *SMOLLM2, "--depth", "3", "--quiet", question)
    assert (direct.stdout, direct.stderr) == ("The capital of France is Paris.\n", "")


def test_standard_input_and_json() -> None:
    ended = run("generate", *TINY, "--json", "--max-tokens", "3", given="one\ntwo\n")
    assert ended.returncode == 0
    assert [json.loads(line)["prompt"] for line in ended.stdout.splitlines()] == ["one", "two"]


def test_a_failure_ends_with_one_line() -> None:
    ended = run("generate", "--model", "/no/such/model", "hello")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1] == (
        "error: /no/such/model does not exist; give a model folder or a *.gguf file"
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("words", ["open checkpoint", "is ready"])
def test_c65_ctrl_c_while_loading_or_generating(words: str) -> None:
    smollm2_gguf()
    process = start("generate", *SMOLLM2, "--ignore-eos", "--max-tokens", "3000", "Tell me a story.")
    seen = interrupt_after(process, words)
    assert process.returncode == 130
    assert seen.splitlines()[-1] == "interrupted"
    assert "Traceback" not in seen


def test_a_reader_that_goes_away_is_no_failure_to_shout_about() -> None:
    process = start("generate", *TINY, "--json", "--max-tokens", "20", "hello", "bye")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        seen = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in seen
    assert "Exception" not in seen


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.seen = ""
        self._position = 0
        child, self._master = pty.fork()
        if child == 0:
            os.execve(sys.executable, [*GAPLESS, *arguments], {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "120"})
        self._child = child

    def wait_for(self, words: str, timeout_s: float = 120.0) -> None:
        """Read until the words come, after those that were waited for before."""
        deadline_s = time.monotonic() + timeout_s
        while (found := self.seen.find(words, self._position)) < 0:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{words!r} did not come; seen: {self.seen[-2000:]!r}"
            if select.select([self._master], [], [], left_s)[0]:
                self.seen += self._read()
        self._position = found + len(words)

    def type(self, text: str) -> None:
        """Type on the keyboard; control characters do what they do on a terminal."""
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Read to the end and return the exit code."""
        while chunk := self._read():
            self.seen += chunk
        os.close(self._master)
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])

    def _read(self) -> str:
        try:
            return os.read(self._master, 65536).decode(errors="replace")
        except OSError:  # the other end was closed
            return ""


def test_a_talk_on_a_terminal() -> None:
    smollm2_gguf()
    terminal = Terminal("chat", *SMOLLM2, "--temperature", "0")
    terminal.wait_for("> ")
    terminal.type("What is the capital of France?\n")
    terminal.wait_for("The capital of France is Paris.")
    terminal.wait_for("> ")
    terminal.type("And of Italy?\n")
    terminal.wait_for("Rome")  # only with what was said before
    terminal.wait_for("> ")
    terminal.type("/help\n")
    terminal.wait_for("/reset")
    terminal.wait_for("> ")
    terminal.type("Write a very long story about a dragon.\n")
    terminal.wait_for("dragon.\r\n")
    terminal.wait_for(" the ")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    terminal.wait_for("> ")
    time.sleep(0.5)  # readline prints its prompt a moment before it listens
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /exit leaves")
    terminal.type("/reset\n")
    terminal.wait_for("the talk starts anew")
    terminal.wait_for("> ")
    terminal.type("What is the capital of Japan?\n")
    terminal.wait_for("Tokyo")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen


def test_a_progress_bar_on_a_terminal() -> None:
    terminal = Terminal("generate", *TINY, "--ignore-eos", "--max-tokens", "500", "hello", "bye")
    assert terminal.end() == 0
    assert "generating" in terminal.seen
    assert "2 requests, 1,000 tokens" in terminal.seen
