"""Files: the suffix chooses, the numbers add up, and what cannot be written is refused with its remedy."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ring_recordings import MS, ring_recording

from gapless.errors import ConfigError
from gapless.timeline.idle import IdleCause
from gapless.timeline.saving import SUFFIXES, save

RECORDING = ring_recording(depth=1, num_steps=40, sleep_before={20: 0.3})
STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".trace.json": b'{"displayTimeUnit"', ".json": b'{"format"'}


def refuse_constant(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


def numbers(path: Path) -> dict[str, Any]:
    tree = json.loads(path.read_text("utf-8"), parse_constant=refuse_constant)
    assert isinstance(tree, dict)
    return tree


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_suffix_chooses(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"run{suffix}"
    path.write_text("an older file")
    save(RECORDING, path)
    assert path.read_bytes().startswith(STARTS[suffix])
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    upper = tmp_path / f"RUN{suffix.upper()}"
    save(RECORDING, str(upper))
    assert upper.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["run.pdf", "run", "json", "run.json.gz"])
def test_other_suffixes_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.trace\.json, \.json"):
        save(RECORDING, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*missing; make it first"):
        save(RECORDING, tmp_path / "missing" / "a.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="it is a folder"):
        save(RECORDING, tmp_path / "folder.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="there is no folder"):
        save(RECORDING, tmp_path / "file" / "a.png")
    # Tests may run as root, to whom every folder is writable.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="is not writable; choose another"):
        save(RECORDING, tmp_path / "a.json")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_text("an older file")
    with pytest.raises(ConfigError, match="zoom=77"):
        save(RECORDING, path, zoom=77)
    assert path.read_text() == "an older file"
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_nothing_is_left_behind_when_the_disk_fails(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Path, target: Path) -> Path:
        raise OSError(f"no space left on device: {self.stat().st_size} bytes for {target}")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        save(RECORDING, tmp_path / f"a{suffix}")
    assert list(tmp_path.iterdir()) == []


def test_threads_may_save_to_one_path_at_once(tmp_path: Path) -> None:
    path, others = tmp_path / "a.json", tmp_path / "a.json.part"
    others.write_text("a file of the user's")
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(save, RECORDING, path) for _ in range(40)]:
            done.result()
    assert len(numbers(path)["steps"]["rows"]) == 40
    assert others.read_text() == "a file of the user's"
    assert {each.name for each in tmp_path.iterdir()} == {"a.json", "a.json.part"}


def test_the_numbers_add_up(tmp_path: Path) -> None:
    save(RECORDING, tmp_path / "a.json")
    tree = numbers(tmp_path / "a.json")
    totals, steps = tree["totals"], tree["steps"]
    assert totals["busy_s"] + sum(tree["idle_s"].values()) == pytest.approx(totals["window_s"])
    assert totals["window_s"] + totals["no_work_s"] == pytest.approx(totals["wall_s"])
    assert totals["device_active"] == pytest.approx(totals["busy_s"] / totals["window_s"])
    assert set(tree["idle_s"]) == {cause.value for cause in IdleCause} - {"no work"}
    assert tree["engine"]["depth"] == 1
    assert tree["roofline"]["decode_steps"] == 39
    assert {"gapless", "torch", "python", "platform", "device"} == set(tree["environment"])
    rows = [dict(zip(steps["columns"], row, strict=True)) for row in steps["rows"]]
    assert [row["step"] for row in rows] == list(range(40))
    assert sum(row["compute_end_s"] - row["compute_start_s"] for row in rows) == pytest.approx(totals["busy_s"])
    assert rows[0]["write_start_s"] == 0
    assert rows[-1]["wait_end_s"] == pytest.approx(totals["wall_s"])
    assert (rows[0]["roofline_share"], rows[1]["launch"], rows[1]["buffers"]) == (None, "graph", "A")
    assert rows[5]["apply_end_s"] - rows[5]["apply_start_s"] == pytest.approx(0.4 * MS)


def test_numbers_and_traces_of_nothing(tmp_path: Path) -> None:
    nothing = ring_recording(num_steps=0)
    save(nothing, tmp_path / "a.json")
    assert numbers(tmp_path / "a.json")["totals"]["device_active"] is None
    save(nothing, tmp_path / "a.trace.json")
    assert "traceEvents" in numbers(tmp_path / "a.trace.json")
    with pytest.raises(ConfigError, match="no steps"):
        save(nothing, tmp_path / "a.png")
