"""What a benchmark leaves behind: files that can be written, with all figures in them, pictures and tables."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from rich.table import Table

from gapless.bench.comparison import Comparison
from gapless.bench.picture import check_picture_path, draw_comparison
from gapless.bench.report import check_writable, comparison_report, environment, write_report
from gapless.bench.tables import depth_table, latency_table, milliseconds
from gapless.errors import ConfigError
from unit.bench.made_runs import made_comparison, made_run


def made() -> Comparison:
    return made_comparison(
        made_run(1, 2.0, busy=0.8), made_run(2, 1.0), made_run(1, 2.2, repeat=2, busy=0.8), made_run(2, 1.1, repeat=2)
    )


def written(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "found.json"
    write_report(path, comparison_report(made(), torch.device("cpu")))
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def shown(table: Table) -> list[str]:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


def test_a_report_has_all_that_is_needed_to_repeat_it(tmp_path: Path) -> None:
    found = written(tmp_path)
    assert {"date", "command", "commit", "gapless", "python", "packages", "device"} <= set(found["environment"])
    assert found["environment"]["packages"]["torch"] == torch.__version__
    assert found["model"] == "a model"
    assert found["config"]["max_rows"] == 256
    assert found["depths"] == [1, 2]
    assert len(found["order"]) == found["repeats"] == 2
    assert found["tokens"] == {"same": True, "verdict": "All 4 runs gave the same tokens."}


def test_a_report_has_the_raw_figures_of_every_run(tmp_path: Path) -> None:
    [workload] = written(tmp_path)["workloads"]
    assert [run["seconds"] for run in workload["runs"]] == [2.0, 1.0, 2.2, 1.1]
    assert workload["runs"][0]["requests"]["ttft_s"] == [0.1, 0.2]
    assert len(workload["runs"][0]["steps"]["periods_s"]) == 9
    assert workload["runs"][0]["steps"]["idle_s"]["enqueue"] == pytest.approx(0.4)
    assert "token_ids" not in workload["runs"][0]
    assert [depth["seconds"] for depth in workload["depths"]] == pytest.approx([2.1, 1.05])
    assert workload["verdict"]["depth"] == 2
    assert workload["floor_s"] == 0.25


def test_lists_of_numbers_take_one_line(tmp_path: Path) -> None:
    write_report(tmp_path / "a.json", {"numbers": [1.25, -2, 3e-9], "other": [{"a": 1}, "b"], "none": []})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert '"numbers": [1.25, -2, 0.0],\n' in text
    assert json.loads(text) == {"numbers": [1.25, -2, 0.0], "other": [{"a": 1}, "b"], "none": []}


def test_a_report_goes_through_a_pipe_and_leaves_it_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_report(pipe, {"a": 1})
        assert json.loads(os.read(reader, 1000)) == {"a": 1}
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_report_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(part: Path, target: Path) -> None:
        raise OSError(f"{part} cannot become {target}")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="cannot become"):
        write_report(tmp_path / "a.json", {"a": 1})
    assert not list(tmp_path.iterdir())


def test_the_environment_names_the_hardware() -> None:
    found = environment(torch.device("cpu"))
    assert found["device"] == "cpu"
    assert found["cpu_cores"] >= 1
    assert found["torch_threads"] == torch.get_num_threads()
    assert "gpu" not in found


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.json", "--json")
    with pytest.raises(ConfigError, match=r"--json .* is a folder"):
        check_writable(tmp_path, "--json")
    with pytest.raises(ConfigError, match=r"--json .* there is no folder"):
        check_writable(tmp_path / "none" / "new.json", "--json")


@pytest.mark.parametrize("closed", ["old.json", "."])
def test_an_old_file_that_cannot_be_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    check_writable(old, "--json")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / closed)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"--json .* may not be written"):
        check_writable(old, "--json")


@pytest.mark.parametrize("name", ["a.jpg", "a", "png"])
def test_a_picture_has_an_ending_that_says_what_it_is(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png or \.svg"):
        check_picture_path(tmp_path / name)
    check_picture_path(tmp_path / "a.PNG")


def test_a_picture_shows_each_depth_and_what_it_was_idle_for(tmp_path: Path) -> None:
    draw_comparison(made(), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for words in ("depth 1", "depth 2", "device active", "idle: enqueue", "roofline", "2.10 s, active 80.0%"):
        assert words in text
    assert "idle: apply" not in text, "a cause that took no time needs no place in the legend"
    draw_comparison(made(), tmp_path / "a.png")
    image = imread(tmp_path / "a.png")
    assert image.shape[1] > 1000
    assert image[..., :3].std() > 0.05, "something is drawn"


def test_the_table_has_a_line_for_each_depth() -> None:
    comparison = made()
    lines = shown(depth_table(comparison, comparison.plan.workloads[0]))
    assert lines[0].startswith("2 requests x 4 + 3 tokens")
    header, [first, second] = lines[2], [line for line in lines if line.startswith("│")]
    for name in ("depth", "seconds", "tokens/s", "ms/step", "p99", "device active", "of roofline", "idle by cause"):
        assert name in header
    for cell in ("2.100 ± 4.8%", "80.00%", "50.0%", "enqueue 20.0%", "100.0"):
        assert cell in first
    for cell in ("1.050 ± 4.8%", "90.00%", "enqueue 10.0%"):
        assert cell in second


def test_latencies_are_percentiles_over_all_requests() -> None:
    comparison = made()
    lines = shown(latency_table(comparison, comparison.plan.workloads))
    first = next(line for line in lines if line.startswith("│"))
    assert "100.0 / 200.0 / 200.0" in first  # TTFT
    assert "10.00 / 20.00 / 20.00" in first  # ITL
    assert "2,000 / 2,200 / 2,200" in first  # end to end


def test_milliseconds_keep_digits_that_count() -> None:
    assert [milliseconds(s) for s in (0.0001234, 0.0999, 0.1234, 12.3456, None)] == [
        "0.12",
        "99.90",
        "123.4",
        "12,346",
        "-",
    ]
