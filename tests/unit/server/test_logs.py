"""The log: one line a record whatever is in it, and serving goes on when nobody reads it."""

import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from gapless.server.logs import MAX_QUEUED_RECORDS, LogWriter, configure_logs, escaped, fields
from gapless.server.security import install
from gapless.server.settings import ServerSettings
from unit.server.test_security import KEYS, Context

EVIL = "a\nFAKE line\r\x1b[2J\x9b\u2028\x00\u202e" + "é😀"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """A logger of the package; every logger is left as it was."""
    root, ours = logging.getLogger(), logging.getLogger("gapless")
    before = [(each, list(each.handlers), each.level) for each in (root, ours, logging.getLogger("uvicorn"))]
    yield logging.getLogger("gapless.server.test")
    logging.getLogger("gapless.server.test").setLevel(logging.NOTSET)
    for each, handlers, level in before:
        each.handlers[:] = handlers
        each.setLevel(level)
    logging.captureWarnings(False)


def write(log: logging.Logger, path: Path, *, json_lines: bool, lines: Any) -> list[str]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = LogWriter(descriptor, json_lines=json_lines)
    log.addHandler(writer)
    log.setLevel(logging.INFO)
    log.propagate = False  # pytest's own handler would fail where ours does not
    lines()
    log.propagate = True
    writer.finish()
    log.removeHandler(writer)
    os.close(descriptor)
    return path.read_text("utf-8").split("\n")[:-1]


@pytest.mark.parametrize("json_lines", [False, True])
def test_a_line_is_a_line_whatever_is_in_it(json_lines: bool, log: logging.Logger, tmp_path: Path) -> None:
    def lines() -> None:
        log.info("message %s", EVIL, extra=fields(path=EVIL, status=200))
        log.info("plain")

    first, second = write(log, tmp_path / "log", json_lines=json_lines, lines=lines)
    assert not [character for character in first if not character.isprintable()]
    if json_lines:
        read = json.loads(first)
        assert read["path"] == EVIL
        assert (read["status"], read["level"], read["logger"]) == (200, "info", "gapless.server.test")
        assert json.loads(second)["message"] == "plain"
    else:
        assert r"message a\nFAKE line\r\x1b[2J\x9b\u2028\x00\u202eé😀" in first
        assert first.endswith("status=200")
        assert second.endswith("INFO    plain")


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("/v1/models", "/v1/models"),
        (200, "200"),
        (None, "None"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("/a status=200 client=1.2.3.4", '"/a status=200 client=1.2.3.4"'),
        ("a=b", '"a=b"'),
        ('"', r'"\""'),
        ('x" status=200 y="', r'"x\" status=200 y=\""'),
        ("a\\", r'"a\\"'),
        ('\\" status=200', r'"\\\" status=200"'),
        ("", '""'),
        ("\t", r'"\t"'),
        ("\N{NO-BREAK SPACE}status=200", r'"\xa0status=200"'),
        ("\N{IDEOGRAPHIC SPACE}x", r'"\u3000x"'),
    ],
)
def test_a_value_cannot_pass_for_another_field(
    value: object, written: str, log: logging.Logger, tmp_path: Path
) -> None:
    def lines() -> None:
        log.info("request", extra=fields(path=value, status=404))

    [line] = write(log, tmp_path / "log", json_lines=False, lines=lines)
    assert line.endswith(f" request path={written} status=404")
    # Who takes quoted parts as one finds each field once.
    found = dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s"=]+)(?: |$)', line))
    assert found == {"path": written, "status": "404"}


def test_a_path_forges_no_field_of_the_access_log(log: logging.Logger, tmp_path: Path) -> None:
    access = logging.getLogger("gapless.access")
    app = FastAPI(redirect_slashes=False)
    install(app, Context(ServerSettings()))  # type: ignore[arg-type]

    def lines() -> None:
        with TestClient(app, base_url="http://127.0.0.1") as client:
            client.get("/x%20status=200%20client=10.0.0.1%0astatus=200", headers={"X-Request-Id": "a=b"})

    [line] = write(access, tmp_path / "log", json_lines=False, lines=lines)
    access.setLevel(logging.NOTSET)
    told = r'request_id="a=b" method=GET path="/x status=200 client=10.0.0.1\nstatus=200" status=404 ms='
    assert told in line


def test_a_trace_cannot_look_like_a_line_of_the_log(log: logging.Logger, tmp_path: Path) -> None:
    def lines() -> None:
        try:
            raise ArithmeticError(EVIL)
        except ArithmeticError:
            log.exception("failed")

    for json_lines in (False, True):
        written = write(log, tmp_path / f"log{json_lines}", json_lines=json_lines, lines=lines)
        if json_lines:
            assert "ArithmeticError" in json.loads(written[0])["trace"]
            assert len(written) == 1
        else:
            assert all(line.startswith("  | ") for line in written[1:])
            assert any("ArithmeticError" in line for line in written)


def test_nobody_reads_and_nothing_waits(log: logging.Logger) -> None:
    reader, descriptor = os.pipe()
    writer = LogWriter(descriptor, json_lines=False)
    log.addHandler(writer)
    log.setLevel(logging.INFO)
    done = threading.Event()

    def talk() -> None:
        for _ in range(MAX_QUEUED_RECORDS + 5000):
            log.info("x" * 200)
        done.set()

    threading.Thread(target=talk, daemon=True).start()
    assert done.wait(30), "a full pipe held up whoever logs"
    assert writer.num_dropped > 0
    log.removeHandler(writer)
    os.close(reader)  # now writing fails, and the thread comes to its end
    writer.finish(10)


@pytest.mark.parametrize("target", ["/dev/full", "a closed pipe"])
def test_a_log_that_cannot_be_written_is_no_error(target: str, log: logging.Logger, capfd: Any) -> None:
    if target == "/dev/full":
        descriptor = os.open(target, os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    writer = LogWriter(descriptor, json_lines=False)
    log.addHandler(writer)
    log.setLevel(logging.INFO)
    for _ in range(3):
        log.info("lost")
    writer.finish()
    log.removeHandler(writer)
    assert writer.num_dropped == 3
    assert capfd.readouterr() == ("", ""), "logging complains nowhere"


def test_a_record_that_cannot_be_formatted_ends_nothing(log: logging.Logger, tmp_path: Path) -> None:
    def lines() -> None:
        log.info("%d", "no number")
        log.info("after")

    first, second = write(log, tmp_path / "log", json_lines=False, lines=lines)
    assert "could not be written: TypeError" in first
    assert second.endswith("after")


def test_escaping_leaves_printable_text_alone() -> None:
    assert escaped("grüße, 世界 😀") == "grüße, 世界 😀"
    assert escaped("\x1b]0;title\x07") == r"\x1b]0;title\x07"


def test_configuring_takes_over_and_sets_levels(log: logging.Logger) -> None:
    writer = configure_logs(level="warning", json_lines=False)
    try:
        assert logging.getLogger().handlers == [writer]
        assert logging.getLogger("gapless").handlers == []
        other = logging.getLogger("gapless.server.other")
        assert not other.isEnabledFor(logging.INFO)
        assert other.isEnabledFor(logging.WARNING)
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    finally:
        writer.finish()


@pytest.mark.parametrize("log_prompts", [False, True])
def test_prompts_and_keys_stay_out_of_the_log_unless_asked_for(
    log_prompts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context = Context(ServerSettings(api_keys=KEYS, log_prompts=log_prompts))
    app = FastAPI(redirect_slashes=False)

    @app.post("/v1/echo")
    async def echo(body: dict[str, Any]) -> Any:
        return body

    install(app, context)  # type: ignore[arg-type]
    headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "my-id"}
    with caplog.at_level(logging.DEBUG, "gapless"), TestClient(app, base_url="http://127.0.0.1") as client:
        client.post("/v1/echo?prompt=PRIVATE", json={"prompt": "PRIVATE"}, headers=headers)
        client.post("/v1/echo", content=b'{"prompt": "PRIVATE"', headers=headers)
        client.post("/v1/echo", json={"prompt": "PRIVATE"}, headers={"Authorization": "Bearer PRIVATE"})
    told = [record.gapless_fields for record in caplog.records if record.name == "gapless.access"]
    assert [each["status"] for each in told] == [200, 422, 401]
    assert {name: told[0][name] for name in ("request_id", "method", "path")} == {
        "request_id": "my-id",
        "method": "POST",
        "path": "/v1/echo",
    }
    everything = " ".join(str(record.__dict__) for record in caplog.records)
    assert ("PRIVATE" in everything) is log_prompts
    assert KEYS[0] not in everything
    if log_prompts:
        assert told[0]["body"] == '{"prompt":"PRIVATE"}'
