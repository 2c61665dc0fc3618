"""Commands run in the process of the tests here, and freeze what it has made so far, as a start does."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """After each test, all objects may be collected again."""
    yield
    gc.unfreeze()
