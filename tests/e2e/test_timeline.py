"""The timeline of a real model, from the command line and from Python."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from fixtures.tokenizers import smollm2_gguf
from gapless import LLM, SamplingParams
from gapless.errors import ConfigError

GAPLESS = [sys.executable, "-c", "from gapless.cli.main import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TERM": "dumb"}
SMOLLM2 = ["--model", "smollm2", "--device", "cpu", "--num-blocks", "200"]


def tree(path: Path) -> dict[str, Any]:
    read = json.loads(path.read_text("utf-8"))
    assert isinstance(read, dict)
    return read


def test_the_command_shows_where_the_time_went(tmp_path: Path) -> None:
    smollm2_gguf()
    arguments = ["timeline", *SMOLLM2, "--requests", "4", "--new-tokens", "24", "--output", str(tmp_path)]
    ended = subprocess.run(
        [*GAPLESS, *arguments], capture_output=True, text=True, timeout=250, env=ENVIRONMENT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert re.match(r"device active \d+\.\d\d% of ", ended.stdout)
    assert "ms a step" in ended.stdout
    assert "24 (8 earlier ones left out), depth 2, on CPU" in ended.stdout
    height, width, _ = imread(tmp_path / "timeline.png").shape
    assert 600 < height < 2000
    assert 1200 < width < 3000
    events = tree(tmp_path / "timeline.trace.json")["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    assert len(computed) == 24
    totals = tree(tmp_path / "timeline.json")["totals"]
    assert sum(event["dur"] for event in computed) * 1e-6 == pytest.approx(totals["busy_s"], rel=0.01)


def test_the_sums_are_the_wall_clocks(tmp_path: Path) -> None:
    smollm2_gguf()
    with LLM("smollm2", device="cpu", num_blocks=200, timeline=True) as llm:
        outputs = llm.generate(["The sky is", "Water"], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
        for name in ("a.png", "a.svg", "a.json", "a.trace.json"):
            llm.timeline.save(tmp_path / name)
            assert (tmp_path / name).stat().st_size > 2000
        summary = llm.timeline.summary()
        llm.timeline.clear()
        assert llm.timeline.recording().steps == ()
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    wall_s = max(each.finished_s or 0.0 for each in metrics) - min(each.arrived_s for each in metrics)
    totals, idle_s = tree(tmp_path / "a.json")["totals"], tree(tmp_path / "a.json")["idle_s"]
    assert totals["steps"] == summary.num_steps == 64
    assert totals["busy_s"] + sum(idle_s.values()) + totals["no_work_s"] == pytest.approx(wall_s, rel=0.01)


def test_without_the_option_the_remedy_is_told() -> None:
    with (
        LLM("tiny-llama", load_format="dummy", device="cpu", num_blocks=64) as llm,
        pytest.raises(ConfigError, match="make the model with timeline=True"),
    ):
        llm.timeline.save("timeline.png")
