"""``gapless timeline``, called in this process on a small random model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gapless.cli.main import app

TINY = ["--model", "tiny-llama", "--load-format", "dummy", "--device", "cpu", "--num-blocks", "64"]
TINY += ["--max-model-len", "512"]
FILES = {"timeline.png", "timeline.svg", "timeline.trace.json", "timeline.json", "zoom.png"}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["timeline", *TINY, *arguments])


def last_line(result: Result) -> str:
    return result.stderr.strip().splitlines()[-1]


def numbers(folder: Path) -> dict[str, Any]:
    tree = json.loads((folder / "timeline.json").read_text("utf-8"))
    assert isinstance(tree, dict)
    return tree


def test_made_up_requests_give_a_summary_and_every_file(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    result = call("--requests", "3", "--prompt-tokens", "20", "--new-tokens", "12", "--output", str(folder))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("device active ")
    assert "12 (8 earlier ones left out), depth 2" in result.stdout
    assert {path.name for path in folder.iterdir()} == FILES
    assert "running 3 requests x 20 + 12 tokens" in result.stderr
    assert f"wrote {folder / 'timeline.png'}" in result.stderr
    steps = numbers(folder)["steps"]
    rows = [dict(zip(steps["columns"], row, strict=True)) for row in steps["rows"]]
    assert sum(row["num_tokens"] for row in rows) == 3 * (20 + 12 - 1)
    assert sum(row["num_samples"] for row in rows) == 3 * 12


def test_prompts_of_a_file(tmp_path: Path) -> None:
    lines = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5], "max_tokens": 2}, {"prompt_token_ids": [9]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines))
    folder = tmp_path / "out"
    result = call("--input", str(file), "--requests", "2", "--new-tokens", "5", "--quiet", "-o", str(folder))
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    steps = numbers(folder)["steps"]
    samples = steps["columns"].index("num_samples")
    assert sum(row[samples] for row in steps["rows"]) == 5 + 2


def test_the_depth_is_the_engines(tmp_path: Path) -> None:
    result = call("--depth", "3", "--new-tokens", "4", "--requests", "1", "-o", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert numbers(tmp_path)["engine"]["depth"] == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--requests", "0"], "requests=0"),
        (["--new-tokens", "0"], "a length of 0 tokens"),
        (["--prompt-tokens", "600"], "shorten the prompt"),
        (["--depth", "0"], "depth=0"),
        (["--output", "missing/folder"], "there is no folder missing"),
        (["--output", "file"], "it is a file"),
    ],
)
def test_wrong_use_is_refused_before_a_model_is_loaded(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = call(*arguments)
    assert result.exit_code == 2
    assert said in last_line(result)
    assert "allocate model" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_step_that_was_not_recorded_cannot_be_shown(tmp_path: Path) -> None:
    result = call("--requests", "1", "--new-tokens", "4", "--zoom", "900", "-o", str(tmp_path))
    assert result.exit_code == 1
    assert "zoom=900 is not recorded: the timeline holds steps " in last_line(result)
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.trace.json", "timeline.json"}
