"""``gapless bench``, called in this process on a small random model."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from gapless.cli.main import app

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu"]
SHORT = ["--prompt-tokens", "8", "--new-tokens", "4", "--repeats", "1"]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


def refused(*arguments: str) -> str:
    """Call it in a wrong way; returns the one line that it says, before any engine has told about its memory."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    return line


def test_help_lists_what_can_be_measured() -> None:
    shown = call("--help").stdout
    assert all(command in shown for command in ("decode", "throughput", "latency", "growth"))


@pytest.mark.parametrize("command", ["decode", "throughput", "latency", "growth"])
def test_each_has_the_engines_options(command: str) -> None:
    shown = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "200"}).stdout
    for flag in ("--model", "--requests", "--json", "--token-budget", "--cuda-graphs", "--load-format", "--dtype"):
        assert flag in shown
    assert ("--depth" in shown) == ("--picture" in shown) == (command != "growth")
    assert "--timeline " not in shown, "it is always on"


@pytest.mark.parametrize("depths", [["--depth", "1", "3"], ["--depth", "1", "--depth", "3"], ["-d", "1", "3"]])
def test_depths_are_run_side_by_side(depths: list[str]) -> None:
    result = call("decode", *TINY, *SHORT, *depths, "--requests", "3")
    assert result.exit_code == 0, result.output
    lines = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("│")]
    assert lines == ["1", "3"]
    assert "All 2 runs gave the same tokens." in result.stdout
    assert "Use depth" in result.stdout
    assert "depth 3: 3 requests x 8 + 4 tokens in" in result.stderr
    assert result.stderr.count("KV cache:") == 1, "what every engine would say is said once"


def test_throughput_mixes_lengths_and_reads_files(tmp_path: Path) -> None:
    mixed = call("throughput", *TINY, *SHORT, "--requests", "6", "--max-rows", "2", "--depth", "2", "--quiet")
    assert mixed.exit_code == 0, mixed.output
    assert mixed.stdout.startswith("6 requests x 8 ± 50% + 4 ± 50% tokens")
    assert mixed.stderr == ""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"messages": [{"role": "user", "content": "hi"}]}\n', encoding="utf-8")
    real = call("throughput", *TINY, *SHORT, "--input", str(prompts), "--depth", "1", "2")
    assert real.exit_code == 0, real.output
    assert real.stdout.startswith("2 prompts of prompts.jsonl")
    ending = call("throughput", *TINY, *SHORT, "--input", str(prompts), "--stop-at-eos", "--requests", "1")
    assert ending.exit_code == 0, ending.output
    assert ending.stdout.startswith("1 prompt of prompts.jsonl")


def test_latency_takes_several_numbers_of_requests(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = call("latency", *TINY, *SHORT, "--requests", "1", "3", "--depth", "2", "--json", str(file))
    assert result.exit_code == 0, result.output
    lines = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    assert [line[1].strip() for line in lines] == ["1", "3"]
    assert all(part.strip() not in ("", "-") for line in lines for part in line[1:-1])
    found = json.loads(file.read_text(encoding="utf-8"))
    assert [len(workload["runs"][0]["requests"]["itl_s"]) for workload in found["workloads"]] == [1, 3]


def test_growth_makes_a_table(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    result = call(
        "growth", *TINY, "--requests", "1", "2", "--contexts", "16", "99999", "--steps", "3", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    assert "beyond the context" in result.stdout
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert [(cell["requests"], cell["context"], cell["state"]) for cell in cells] == [
        (1, 16, "run"),
        (1, 99999, "beyond the context"),
        (2, 16, "run"),
        (2, 99999, "beyond the context"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["decode", "--requests", "0"], "requests=0: a benchmark needs at least 1"),
        (["latency", "--requests", "2", "0"], "requests=0: a benchmark needs at least 1"),
        (["latency", "--requests", "2", "2"], "is there twice"),
        (["decode", "--prompt-tokens", "0"], "0 tokens cannot be run"),
        (["decode", "--prompt-tokens", "3000"], "3000 and 4 new tokens, and the context holds 2048"),
        (["decode", "--max-model-len", "10"], "8 and 4 new tokens, and the context holds 10"),
        (["throughput", "--spread", "2"], "spread=2.0 must be in [0, 1]"),
        (["decode", "--depth", "0"], "depth=0 must be an integer of at least 1"),
        (["decode", "--depth", "2", "2"], "depth=2 2 names a depth twice"),
        (["decode", "--repeats", "0"], "repeats=0"),
        (["decode", "--dtype", "int3"], "dtype='int3' is unknown"),
        (["decode", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["decode", "--picture", "/nowhere/at/all.png"], "there is no folder /nowhere/at"),
        (["decode", "--picture", "picture.gif"], "must end in .png or .svg"),
        (["growth", "--contexts", "0"], "contexts=0"),
        (["growth", "--json", "/"], "is a folder"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(arguments: list[str], message: str) -> None:
    command, *others = arguments
    short = [] if command == "growth" else SHORT
    assert message in refused(command, *TINY, *short, *others)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["decode", "growth"])
def test_a_device_that_is_not_there_is_named(command: str) -> None:
    assert "torch sees no CUDA device" in refused(command, *TINY, "--device", "cuda")


def test_an_unknown_preset_is_named(tmp_path: Path) -> None:
    for command in ("decode", "growth"):
        result = call(command, "--model", "no-such-model", "--load-format", "dummy")
        assert result.exit_code == 1
        assert "no-such-model" in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


def test_prompts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing = call("throughput", *TINY, *SHORT, "--input", str(tmp_path / "none.jsonl"))
    assert missing.exit_code == 1
    assert "none.jsonl" in missing.stderr
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "a"}\n{"pormpt": "b"}\n', encoding="utf-8")
    assert "broken.jsonl:2" in refused("throughput", *TINY, *SHORT, "--input", str(broken))
