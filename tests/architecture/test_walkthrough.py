"""The token walk-through tells the truth: its stops exist, are called, and come in the order that it gives."""

import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType

import pytest
from source_tree import ROOT, resolve

from gapless import LLM, SamplingParams

PAGE = Path(ROOT, "docs", "token-walkthrough.md")
STOP = re.compile(r"^\d+\. `([\w.]+)`", re.MULTILINE)


def stops() -> list[str]:
    """The functions that the page names, in its order."""
    return STOP.findall(PAGE.read_text(encoding="utf-8"))


def implementations(dotted: str) -> set[CodeType]:
    """The code of the function called ``module.Class.method``, and of methods that override it."""
    module_name, rest = _split(dotted)
    owner: object = import_module(f"gapless.{module_name}")
    *classes, name = rest
    for part in classes:
        owner = getattr(owner, part)
    owners = [owner, *_subclasses(owner)] if isinstance(owner, type) else [owner]
    return {vars(each)[name].__code__ for each in owners if name in vars(each)}


def first_calls(watched: set[CodeType], run: Callable[[], object]) -> list[tuple[int, CodeType]]:
    """The first call of each function during ``run``, as (thread, code), in the order in which they began."""
    calls: dict[CodeType, int] = {}

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in watched:
            calls.setdefault(frame.f_code, threading.get_ident())

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return [(thread, code) for code, thread in calls.items()]


def test_stops_exist() -> None:
    names = stops()
    assert len(names) >= 20
    assert not [name for name in names if resolve(name) is None]


def test_a_token_passes_the_stops_in_order() -> None:
    names = stops()
    stop_of = {code: name for name in names for code in implementations(name)}
    called: list[tuple[int, str]] = []

    def run() -> None:
        with LLM("tiny-llama", load_format="dummy", device="cpu", depth=2, num_blocks=16, max_rows=2) as llm:
            outputs = llm.generate(["A token."], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert len(outputs[0].outputs[0].token_ids) == 3

    for thread, code in first_calls(set(stop_of), run):
        called.append((thread, stop_of[code]))
    assert set(names) == {name for _, name in called}, "a stop was not passed"
    threads = {thread for thread, _ in called}
    # The caller's, the engine's and the compute stream's.
    assert len(threads) == 3
    for thread in threads:
        # Threads run beside each other, so an order across them would be a matter of luck.
        own = [name for each, name in called if each == thread]
        assert own == sorted(own, key=names.index)


@pytest.mark.parametrize("name", ["llm.LLM.no_such_method", "no_such_module.f", "pipeline.ring.NoSuchClass.submit"])
def test_a_stop_that_is_gone_is_noticed(name: str) -> None:
    assert resolve(name) is None


def _split(dotted: str) -> tuple[str, list[str]]:
    parts = dotted.split(".")
    for split in range(len(parts) - 1, 0, -1):
        path = ROOT.joinpath("src", "gapless", *parts[:split])
        if path.with_suffix(".py").exists():
            return ".".join(parts[:split]), parts[split:]
    raise AssertionError(f"no module for {dotted}")


def _subclasses(owner: type) -> list[type]:
    return [each for child in owner.__subclasses__() for each in (child, *_subclasses(child))]
