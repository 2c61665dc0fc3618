"""Failures of the hub's client that a hub on this machine does not cause; ``e2e`` has the others."""

import errno
import os

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from gapless.model.checkpoint.hub_failures import hub_failure, may_pass, reason_of


class ConnectError(Exception):
    """Named as in the client's HTTP library."""


class NetworkError(Exception):
    """Named as in the client's HTTP library."""


class ReadError(NetworkError):
    """Named as in the client's HTTP library."""


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_a_cache_that_cannot_be_written_is_named(number: int) -> None:
    error = OSError(number, os.strerror(number), "/somewhere")
    assert not may_pass(error)
    assert str(hub_failure("org/name", "v1", error)) == (
        f"model='org/name@v1' could not be kept in {constants.HF_HUB_CACHE} ({os.strerror(number)}); "
        "make room there, or point HF_HOME elsewhere"
    )


def test_a_connection_that_broke_may_hold_the_next_time() -> None:
    assert may_pass(ReadError("reset"))
    assert str(hub_failure("org/name", None, ReadError("reset"))) == (
        "model='org/name' did not arrive whole (ReadError: reset); try again: files that did arrive are kept"
    )


def test_a_hub_that_cannot_be_reached_is_not_waited_for() -> None:
    error = LocalEntryNotFoundError("not in the cache\nand no hub")
    error.__cause__ = ConnectError("refused\nhint")
    assert not may_pass(error)
    assert reason_of(error) == "ConnectError: refused"
    message = str(hub_failure("org/name", None, error))
    assert f"{constants.ENDPOINT} could not be asked (ConnectError: refused); check the connection" in message
    assert "\n" not in message


def test_a_file_of_another_size_may_arrive_whole_the_next_time() -> None:
    error = OSError("Consistency check failed: file should be of size 9 but has size 5 (model).\nRetry.")
    assert may_pass(error)
    message = str(hub_failure("org/name", None, error))
    assert "did not arrive whole (a file arrived with another size than it has there)" in message


def test_an_error_without_words_is_named_by_its_class() -> None:
    assert reason_of(ValueError()) == "ValueError"
    assert "could not be asked (ValueError)" in str(hub_failure("org/name", None, ValueError()))


def test_an_address_is_never_told() -> None:
    """The store's addresses are signed, so an answer is told by its status alone."""

    class Answer:
        status_code = 503

    error = OSError("Server error '503' for url 'https://store/?Signature=secret'")
    error.response = Answer()  # type: ignore[attr-defined]
    assert may_pass(error)
    assert "secret" not in str(hub_failure("org/name", None, error))
    assert reason_of(error) == "the hub answered with status 503"
