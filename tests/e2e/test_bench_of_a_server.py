"""``gapless bench serve`` on ``gapless serve``: the client counts the tokens that were asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from e2e.served_process import TINY, Served, served
from gapless.cli.main import app


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("served") / "log", *TINY) as process:
        process.wait_until_ready()
        yield process


def levels_of(server: Served, tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    file = tmp_path / "found.json"
    url = f"http://127.0.0.1:{server.port}"
    done = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--json", str(file), "--quiet", *arguments])
    assert done.exit_code == 0, done.output
    return list(json.loads(file.read_text(encoding="utf-8"))["levels"])


def test_completions_have_exactly_the_tokens_asked_for(server: Served, tmp_path: Path) -> None:
    sizes = ["--requests", "6", "--prompt-tokens", "21", "--new-tokens", "9"]
    levels = levels_of(server, tmp_path, "--concurrency", "1", "3", *sizes)
    for level in levels:
        assert level["failures"] == {}
        assert (level["completed"], level["prompt_tokens"], level["output_tokens"]) == (6, 6 * 21, 6 * 9)
        assert 0 < level["ttft"]["p50_s"] < level["end_to_end"]["p50_s"]
        assert level["tpot"]["p50_s"] > 0


def test_chats_arrive_at_a_rate(server: Served, tmp_path: Path) -> None:
    sizes = ["--requests", "8", "--prompt-tokens", "5", "--new-tokens", "4", "--endpoint", "chat"]
    [level] = levels_of(server, tmp_path, "--rate", "50", "--ttft-slo", "60000", *sizes)
    assert (level["completed"], level["output_tokens"], level["good_share"]) == (8, 8 * 4, 1.0)
    due = [record["due_s"] for record in level["records"]]
    assert due == sorted(due)
    assert due[0] == 0.0
