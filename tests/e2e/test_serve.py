"""``gapless serve`` as a process: how it starts, drains, dies and is configured."""

import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from e2e.served_process import ENVIRONMENT, GAPLESS, TINY, Served, gone, served

# More than 2 s of steps, less than 60.
LONG = 1500
ENDLESS = 100_000


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as it was; with every option from file and environment."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text("file-key-0123456789\n")
    (folder / "gapless.toml").write_text(
        'model = "tiny-llama"\nload_format = "dummy"\ndevice = "cpu"\nnum_blocks = 256\nport = 1\nlog_json = false\n'
        f'served_model_name = ["tiny-llama", "other name"]\napi_key_file = "{folder}/keys"\n'
    )
    environment = {"GAPLESS_PORT": "0", "GAPLESS_API_KEYS": "environment-key-0123", "GAPLESS_MAX_ROWS": "8"}
    with served(folder / "log", "--config", str(folder / "gapless.toml"), environment=environment) as server:
        server.wait_until_ready()
        yield server
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_settings_come_from_file_and_environment(shared: Served) -> None:
    for key in ("file-key-0123456789", "environment-key-0123"):
        status, models = shared.ask("GET", "/v1/models", Authorization=f"Bearer {key}")
        assert status == 200
        assert [model["id"] for model in models["data"]] == ["tiny-llama", "other name"]
    assert shared.ask("GET", "/v1/models")[0] == 401
    assert shared.ask("GET", "/metrics")[0] == 401
    assert shared.ask("GET", "/health") == (200, {"status": "ok"})
    assert shared.ask("GET", "/ready") == (200, {"status": "ready"})
    assert "key-0123" not in shared.told
    environment = Path(f"/proc/{shared.engine().pid}/environ").read_bytes()
    assert b"GAPLESS_" not in environment, "keys are not the engine's business"


def test_requests_are_logged_and_counted_without_their_text(shared: Served) -> None:
    key = {"Authorization": "Bearer file-key-0123456789"}
    body = {"model": "other name", "prompt": "PRIVATE", "max_tokens": 3, "ignore_eos": True}
    status, answer = shared.ask("POST", "/v1/completions", body, **key, **{"X-Request-Id": "my-request"})
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    shared.wait_for("request_id=my-request method=POST path=/v1/completions status=200")
    assert "PRIVATE" not in shared.told
    status, metrics = shared.ask("GET", "/metrics", **key)
    assert status == 200
    assert re.search(r'^gapless_http_requests_total{.*route="/v1/completions",status="200"} 1', metrics, re.MULTILINE)
    assert re.search(r"^gapless_time_to_first_token_seconds_count 1", metrics, re.MULTILINE)
    assert re.search(r"^gapless_queue_time_seconds_count 1", metrics, re.MULTILINE)
    assert re.search(r"^gapless_generation_tokens_total 3", metrics, re.MULTILINE)
    assert re.search(r'^gapless_device_idle_seconds_total{cause="launch"} \d', metrics, re.MULTILINE)
    assert re.search(r"^gapless_engine_up 1", metrics, re.MULTILINE)


def test_prompts_cached_for_one_key_are_not_found_with_another(shared: Served) -> None:
    body = {"model": "tiny-llama", "prompt": "a long prompt that fills some blocks " * 8, "max_tokens": 1}

    def cached(key: str) -> int:
        status, answer = shared.ask("POST", "/v1/completions", body, Authorization=f"Bearer {key}")
        assert status == 200
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("file-key-0123456789") == 0
    assert cached("file-key-0123456789") > 0
    assert cached("environment-key-0123") == 0
    assert cached("environment-key-0123") > 0


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*GAPLESS, "serve", "/no/such/model", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            env=ENVIRONMENT,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"error: port={port} on 127.0.0.1 is in use; choose another one, or end what uses it"
    ]
    assert ended.stdout == ""


def test_a_model_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path) -> None:
    with served(tmp_path / "log", "/no/such/model", "--port", "0", "--log-json") as server:
        assert server.end(60) == 1
    *lines, last = server.told.splitlines()
    assert last.startswith("error: /no/such/model does not exist")
    assert "/no/such/model does not exist" in json.loads(lines[-1])["error"]
    assert "Traceback" not in server.told


def test_missing_packages_are_named() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; from gapless.cli.main import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "serve", "smollm2", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env=ENVIRONMENT,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: gapless serve needs the package uvicorn: pip install 'gapless[server]'\n"


def test_c65_streams_end_before_the_process_does(tmp_path: Path) -> None:
    with served(tmp_path / "log", *TINY, "--log-json") as server, ExitStack() as stack:
        server.wait_for('"message": "ready"')
        family = server.family()
        streams = [stack.enter_context(server.stream(LONG)) for _ in range(5)]
        server.signal(signal.SIGTERM)
        server.wait_for("draining")
        assert server.ask("GET", "/ready") == (503, {"status": "draining"})
        assert server.ask("GET", "/health")[0] == 200
        connection = stack.enter_context(closing(server.connect()))
        connection.request("POST", "/v1/completions", "{}", {"Content-Type": "application/json"})
        refused = connection.getresponse()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) > 0
        refused.read()
        for stream in streams:
            text = stream.read().decode()
            assert text.endswith("data: [DONE]\n\n")
            assert '"finish_reason":"length"' in text
            assert '"error"' not in text
        assert server.end() == 0
        assert gone(family, 2)
        assert all(json.loads(line) for line in server.told.splitlines())
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free


def test_c65_endless_streams_are_cut_off_with_an_error(tmp_path: Path) -> None:
    # One row, so that most streams wait and cannot have ended in time.
    with served(tmp_path / "log", *TINY, "--drain-timeout", "0.2", "--max-rows", "1") as server, ExitStack() as stack:
        server.wait_until_ready()
        family = server.family()
        streams = [stack.enter_context(server.stream(ENDLESS)) for _ in range(8)]
        server.signal(signal.SIGINT)
        texts = [stream.read().decode() for stream in streams]
        assert server.end() == 0
        assert gone(family, 2)
    assert all(text.endswith("data: [DONE]\n\n") for text in texts)
    cut = [text for text in texts if '"code":"shutdown"' in text]
    assert len(cut) >= 6
    assert not [text for text in texts if ('"finish_reason":"length"' in text) is (text in cut)]


def test_c65_the_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "log", *TINY) as server:
        server.wait_until_ready()
        family = server.family()
        with server.stream(ENDLESS), server.stream(ENDLESS):
            server.signal(signal.SIGINT)
            server.wait_for("draining")
            server.signal(signal.SIGTERM)
            assert server.end(2) == 128 + signal.SIGTERM
            assert gone(family, 2)


def test_c65_a_signal_while_loading_ends_it(tmp_path: Path) -> None:
    with served(tmp_path / "log", *TINY) as server:
        server.wait_for("listening")
        while len(server.family()) < 2:
            time.sleep(0.01)
        family = server.family()
        for path in ("/health", "/ready", "/v1/models"):
            status, answer = server.ask("GET", path)
            assert (status, answer["error"]["code"]) == (503, "starting")
        server.signal(signal.SIGINT)
        assert server.end(5) == 128 + signal.SIGINT
        assert gone(family, 2)
        assert "Traceback" not in server.told


def test_c58_a_killed_engine_fails_whoever_waits_and_ends_the_server(tmp_path: Path) -> None:
    with served(tmp_path / "log", *TINY, "--max-rows", "1") as server, ExitStack() as stack:
        server.wait_until_ready()
        streams = [stack.enter_context(server.stream(ENDLESS)) for _ in range(3)]
        server.engine().send_signal(signal.SIGKILL)
        health = 200
        deadline_s = time.monotonic() + 2
        while health == 200:
            assert time.monotonic() < deadline_s, "healthy without an engine"
            try:
                health = server.ask("GET", "/health")[0]
            except (OSError, http.client.HTTPException):
                health = 503  # it has ended already
        assert health == 503
        texts = [stream.read().decode() for stream in streams]
        assert len([text for text in texts if '"error"' in text]) >= 2
        assert all(text.endswith("data: [DONE]\n\n") for text in texts)
        assert server.end(5) == 70
        assert "the engine has died" in server.told


def test_a_full_disk_under_the_log_hurts_nobody(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "log"
    log.symlink_to("/dev/full")
    with served(log, *TINY[:-1], str(port)) as server:
        server.port = port
        deadline_s = time.monotonic() + 60
        ready = 0
        while ready != 200:
            assert server.process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
            with suppress(OSError):
                ready = server.ask("GET", "/ready")[0]
        assert server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 2})[0] == 200
        dropped = re.search(r"^gapless_log_lines_dropped_total (\S+)", server.ask("GET", "/metrics")[1], re.MULTILINE)
        assert dropped is not None
        assert float(dropped[1]) >= 9, "each line of loading, and that it is ready"
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "gapless.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # as a killed server leaves it
    with served(tmp_path / "log", *TINY, "--uds", str(path)) as server:
        server.wait_until_ready()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        with server.dial() as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: any.example\r\nConnection: close\r\n\r\n")
            answer = b""
            while part := connection.recv(4096):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 ")
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert not path.exists()
