"""A process that loads models by their names: the hub's client reads its settings when it is imported."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fixtures.hub_server import Hub

__all__ = ["Loader", "environment", "loader"]

LOADS_MODELS = """
import json, os, sys
from gapless import LLM, SamplingParams
from gapless.errors import GaplessError

for line in sys.stdin:
    asked = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if asked["token"] is not None:
        os.environ["HF_TOKEN"] = asked["token"]
    try:
        with LLM(asked["model"], load_format=asked["load_format"], device="cpu", num_blocks=8) as llm:
            (output,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=6))
        answer = {"ids": list(output.outputs[0].token_ids)}
    except GaplessError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer), flush=True)
"""


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """That of a process whose hub is the given one, and whose home on it is the given folder."""
    foreign = ("HF_", "GAPLESS_", "TRANSFORMERS_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
    }
    return {**inherited, **own, **more}


class Loader:
    """A process that loads models by name and answers a prompt with each."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, model: str, *, token: str | None = None, load_format: str = "auto") -> dict[str, Any]:
        """The answer with a model, or the error that it gave."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"model": model, "token": token, "load_format": load_format}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, dict)
        return answer

    def ids(self, model: str, *, token: str | None = None, load_format: str = "auto") -> list[int]:
        """The tokens of an answer."""
        answer = self.ask(model, token=token, load_format=load_format)
        assert "ids" in answer, answer
        ids = answer["ids"]
        assert isinstance(ids, list)
        return ids

    def refusal(self, model: str, *, token: str | None = None, kind: str = "CheckpointError") -> str:
        """The message of an error, which is one line."""
        answer = self.ask(model, token=token)
        assert answer.get("error") == kind, answer
        message = answer["message"]
        assert isinstance(message, str)
        assert "\n" not in message
        return message


@contextmanager
def loader(hub: Hub, home: Path, log: Path, **more: str) -> Iterator[Loader]:
    """A loading process; what it wrote to standard error is in the log."""
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", LOADS_MODELS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(hub, home, **more),
        ) as process,
    ):
        try:
            yield Loader(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
