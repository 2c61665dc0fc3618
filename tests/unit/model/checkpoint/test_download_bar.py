"""Who is told of the bytes of a download."""

import io
import logging
import sys

import pytest

from gapless.model.checkpoint import NoProgress
from gapless.model.checkpoint.download_bar import watched


class Terminal(io.StringIO):
    """What rich takes for a terminal."""

    def isatty(self) -> bool:
        return True


class Watcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def stage(self, name: str) -> None:
        """Nothing."""

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        self.told.append((bytes_done, bytes_total))


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Within a test: pytest sets standard error anew for each."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(logging.getLogger("gapless"), "level", logging.NOTSET)
    return terminal


def test_a_terminal_shows_a_bar_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with watched(NoProgress(), "downloading org/[bold]name") as advance:
        advance(1_000_000, 2_500_000)
    assert "downloading org/[bold]name" in terminal.getvalue()
    assert "1.0/2.5 MB" in terminal.getvalue()


def test_a_watcher_is_told_and_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    watcher = Watcher()
    with watched(watcher, "downloading org/name") as advance:
        advance(1, 2)
    assert watcher.told == [(1, 2)]
    assert terminal.getvalue() == ""


def test_a_quiet_log_and_a_pipe_show_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setattr(logging.getLogger("gapless"), "level", logging.WARNING)
    with watched(NoProgress(), "downloading org/name") as advance:
        advance(1, 2)
    assert terminal.getvalue() == ""
    monkeypatch.setattr(logging.getLogger("gapless"), "level", logging.NOTSET)
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    with watched(NoProgress(), "downloading org/name") as advance:
        advance(1, 2)
    assert pipe.getvalue() == ""
