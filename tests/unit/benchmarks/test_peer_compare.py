"""The driver of the peer benchmarks: real scripts in turn, failures by name, medians and ratios."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import compare
import psutil
import pytest
from workload import Workload

from fixtures.waiting import until

TINY = Workload(preset="tiny-llama", requests=2, prompt=9, new_tokens=30, device="cpu", dtype="float32", seed=0)


def result(seconds: float, step_ms: float | None) -> dict[str, object]:
    return {"engine": "x", "seconds": seconds, "tokens_per_s": 1000 / seconds, "ms_per_step": step_ms}


def run(engine: str, seconds: float | None, step_ms: float | None = None, error: str | None = None) -> compare.Run:
    return compare.Run(
        engine=engine, command="", result=None if seconds is None else result(seconds, step_ms), error=error
    )


def test_medians_and_ratios() -> None:
    runs = [run("a", 4.0, 8.0), run("b", 10.0, 20.0), run("a", 6.0, 10.0), run("a", 50.0, 9.0), run("b", 14.0, None)]
    a, b = compare.summaries(runs, baseline="a")
    assert (a.seconds, a.ms_per_step, a.seconds_ratio, a.step_ratio) == (6.0, 9.0, 1.0, 1.0)
    assert (b.seconds, b.ms_per_step, b.seconds_ratio) == (12.0, 20.0, 2.0)
    assert b.step_ratio == pytest.approx(20 / 9, abs=1e-3)


def test_failures_stay_in_the_table_by_name() -> None:
    runs = [run("slow", 9.0), run("gone", None, error="exit code 3: not installed"), run("base", 3.0)]
    found = compare.summaries(runs, baseline="base")
    lines = compare.table(found, "base").splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["base", "slow", "gone"]
    assert "3.00x" in lines[2]
    assert lines[3].endswith("FAILED: exit code 3: not installed")


def test_without_the_baseline_there_are_no_ratios() -> None:
    [only] = compare.summaries([run("b", 2.0, 5.0)], baseline="a")
    assert only.seconds == 2.0
    assert only.seconds_ratio is None
    assert only.step_ratio is None


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compare, "HERE", tmp_path)
    return tmp_path


def test_the_last_line_of_the_error_is_kept(scripts: Path) -> None:
    (scripts / "fails.py").write_text("raise ValueError('no such kernel')")
    found = compare.run_engine("x", ["fails.py"], TINY, timeout_s=60)
    assert found.result is None
    assert found.error == "exit code 1: ValueError: no such kernel"


def test_a_script_without_a_result_has_failed_too(scripts: Path) -> None:
    (scripts / "silent.py").write_text("print('hello')")
    assert compare.run_engine("x", ["silent.py"], TINY, timeout_s=60).error == "exit code 0: it said nothing"


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_takes_too_long_ends_with_all_of_its_processes(scripts: Path) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, file=sys.stderr, flush=True)"
    (scripts / "hangs.py").write_text(f"{child}\nopen({str(scripts / 'pid')!r}, 'w').write(str(p.pid)); p.wait()")
    found = compare.run_engine("x", ["hangs.py"], TINY, timeout_s=8)
    assert found.error == "took longer than 8 s"
    pid = int((scripts / "pid").read_text())
    # A killed process is a moment in dying, and may then be a zombie that nobody collects.
    until(lambda: not _lives(pid), 30)


def test_other_lines_of_the_engine_are_passed_over(scripts: Path) -> None:
    line = json.dumps({"engine": "x", "seconds": 1.5})
    (scripts / "chatty.py").write_text(f"import sys\nprint('INFO loading')\nprint({line!r})\nprint('bye')")
    found = compare.run_engine("x", ["chatty.py", "--flag"], TINY, timeout_s=60)
    assert found.result == {"engine": "x", "seconds": 1.5}
    assert found.error is None
    assert "chatty.py --flag --preset tiny-llama --requests 2" in found.command


@pytest.mark.skipif(find_spec("vllm") is not None, reason="shows what happens without vLLM")
def test_engines_in_turn_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    options = ["--preset", "tiny-llama", "--device", "cpu", "--requests", "2", "--prompt", "9", "--new-tokens", "30"]
    engines = ["gapless-depth-2", "transformers-sync", "vllm"]
    done = subprocess.run(
        [sys.executable, compare.__file__, *options, "--engines", *engines, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert sorted(run["engine"] for run in written["runs"]) == sorted(engines)
    by_name = {each["engine"]: each for each in written["summary"]}
    assert by_name["gapless-depth-2"]["seconds_ratio"] == 1.0
    assert by_name["transformers-sync"]["seconds"] > 0
    assert by_name["transformers-sync"]["ms_per_step"] > 0
    assert "not installed" in by_name["vllm"]["error"]
    for run in written["runs"]:
        assert run["result"] is None or run["result"]["tokens"] == 60
        assert run["command"].startswith("PYTHONPATH=src python benchmarks/peers/")
    assert "vllm" in done.stdout
    assert {"date", "command", "commit", "gpu", "cpu"} <= set(written["environment"])
