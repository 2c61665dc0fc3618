"""The driver's calls that open a GPU; the driver itself is replaced, since most machines of the tests have none."""

import ctypes
from typing import Any

import pytest

from gapless.cli.gpu_opening import open_gpu


class Driver:
    """Answers as ``libcuda`` does."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append(name)
            if name == "cuDeviceGet":
                assert arguments[1] == 0, "the first visible GPU"
            return self.answers.get(name, 0)

        return call


@pytest.mark.parametrize(
    ("answers", "calls"),
    [
        ({}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ({"cuInit": 100}, ["cuInit"]),  # no device
        ({"cuDeviceGet": 101}, ["cuInit", "cuDeviceGet"]),
        ({"cuDevicePrimaryCtxRetain": 2}, ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),  # out of memory
    ],
)
def test_the_first_gpu_gets_its_context_and_a_fault_ends_it(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, int], calls: list[str]
) -> None:
    driver = Driver(**answers)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    open_gpu().join()
    assert driver.calls == calls


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    open_gpu().join()  # an exception in the thread would fail this test
