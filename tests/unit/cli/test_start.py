"""What a start shows, and what it leaves of Python's cycle collector."""

import gc
import re
import weakref
from types import SimpleNamespace

import pytest

from gapless.cli.start import StartProgress, collector_paused, started


class Node:
    """An object that can be in a cycle."""


def test_the_collector_stands_still_in_the_block_and_skips_what_that_made() -> None:
    before = gc.get_freeze_count()
    with collector_paused():
        assert not gc.isenabled()
        kept = [Node() for _ in range(1000)]
        lost = Node()
        lost.me = lost  # type: ignore[attr-defined]
        gone = weakref.ref(lost)
        del lost
    assert gc.isenabled()
    assert gone() is None, "garbage of the start is not kept for ever"
    assert gc.get_freeze_count() >= before + len(kept)


def test_the_collector_runs_again_after_a_start_that_failed() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_stages_are_told_with_their_times(capsys: pytest.CaptureFixture[str]) -> None:
    def make(model: str, *, progress: StartProgress, depth: int, device: str) -> str:
        progress.stage("open checkpoint")
        progress.stage("read weights")
        return f"{model} of depth {depth}"

    made = started(lambda: make, "m", options={"depth": 3, "device": "cpu"}, given={}, quiet=False)
    assert made == "m of depth 3"
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["import torch ...", "open checkpoint ...", "read weights ..."]
    assert re.fullmatch(r"m is ready after 0\.0 s \(depth 3\)", lines[3])


def test_times_name_each_stage_that_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 12.01, 15.51])
    monkeypatch.setattr("gapless.cli.start.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with StartProgress() as progress:
        for name in ("import torch", "open checkpoint", "read weights"):
            progress.stage(name)
    assert progress.times() == "5.5 s: import torch 2.0, read weights 3.5"


def test_a_quiet_start_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert started(
        lambda: lambda model, **options: (model, options),
        "m",
        options={"depth": 1, "device": "auto"},
        given={},
        quiet=True,
    )
    assert capsys.readouterr().err == ""
