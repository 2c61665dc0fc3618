"""``gapless bench`` on a real model: table, figures, picture, and what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gapless.cli.main import app

SMOLLM2 = ["--model", "smollm2", "--device", "cpu", "--repeats", "1", "--quiet"]
PROMPTS = Path(__file__).parent / "prompts64.jsonl"


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result


def report_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_decode_compares_depths(tmp_path: Path) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    size = ["--requests", "2", "--prompt-tokens", "12", "--new-tokens", "6"]
    shown = call("decode", *SMOLLM2, *size, "--depth", "1", "2", "--json", str(file), "--picture", str(picture)).stdout
    assert shown.startswith("2 requests x 12 + 6 tokens")
    for words in ("device active", "of roofline", "Use depth", "-bound at depth", "All 2 runs gave the same tokens."):
        assert words in shown
    found = report_of(file)
    [workload] = found["workloads"]
    assert sorted(run["depth"] for run in workload["runs"]) == [1, 2]
    for run in workload["runs"]:
        assert run["num_steps"] == 6
        assert 0 < run["busy_s"] <= run["window_s"] <= run["seconds"] * 1.5
        # SmolLM2 has 134.5 million parameters of four bytes, which each of the six steps reads.
        assert run["steps"]["read_bytes"] == pytest.approx(6 * 134.5e6 * 4, rel=0.02)
    assert 0 < workload["floor_s"] < min(run["seconds"] for run in workload["runs"])
    assert "depth 2" in picture.read_text(encoding="utf-8")


def test_throughput_runs_real_prompts(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    size = ["--input", str(PROMPTS), "--requests", "3", "--new-tokens", "4", "--max-rows", "2"]
    shown = call("throughput", *SMOLLM2, *size, "--depth", "1", "2", "--json", str(file)).stdout
    assert shown.startswith("3 prompts of prompts64.jsonl")
    assert report_of(file)["tokens"]["same"]
    for run in report_of(file)["workloads"][0]["runs"]:
        assert run["requests"]["num_tokens"] == [4, 4, 4]
        assert run["requests"]["num_prompt_tokens"] == [1, 3, 12]


def test_latency_is_measured_token_by_token(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    size = ["--requests", "1", "2", "--prompt-tokens", "8", "--new-tokens", "5"]
    shown = call("latency", *SMOLLM2, *size, "--depth", "2", "--json", str(file)).stdout
    for words in ("TTFT", "TPOT", "ITL", "end to end"):
        assert words in shown
    for workload in report_of(file)["workloads"]:
        [run] = workload["runs"]
        requests = run["requests"]
        for ttft_s, itl_s, end_s in zip(requests["ttft_s"], requests["itl_s"], requests["end_to_end_s"], strict=True):
            assert len(itl_s) == 4
            assert ttft_s + sum(itl_s) == pytest.approx(end_s, abs=0.1)
