"""The files of ``examples/deploy``: what they name is there, and they work where the programs are installed."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

from e2e.served_process import TINY, Served, served
from gapless.cli.settings_sources import settings_table
from gapless.server.settings import ServerSettings

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
KEY = "a-key-for-this-test"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
NGINX, SYSTEMD = shutil.which("nginx"), shutil.which("systemd-analyze")


def test_the_kubernetes_example_probes_what_is_there() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert container["ports"] == [{"name": "http", "containerPort": ServerSettings().port}]
    table = {setting.flag: setting for setting in settings_table() if setting.flag}
    arguments = container["args"]
    assert arguments[:2] == ["gapless", "serve"]
    assert {argument for argument in arguments if argument.startswith("--")} <= set(table)
    variables = {setting.variable for setting in table.values()}
    assert {variable["name"] for variable in container["env"]} <= variables
    drain_s = float(arguments[arguments.index("--drain-timeout") + 1])
    sleep_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain_s + sleep_s
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_the_systemd_example_waits_longer_than_the_drain() -> None:
    unit = (DEPLOY / "gapless.service").read_text("utf-8")
    [timeout_s] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(timeout_s) > ServerSettings().drain_timeout_s
    assert "Restart=on-failure" in unit
    variables = set(re.findall(r"^Environment=(GAPLESS_\w+)=", unit, re.MULTILINE))
    assert variables <= {setting.variable for setting in settings_table()}


@pytest.mark.skipif(SYSTEMD is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    assert SYSTEMD is not None
    unit = tmp_path / "gapless.service"
    text = (DEPLOY / "gapless.service").read_text("utf-8")
    unit.write_text(text.replace("/opt/gapless/bin/gapless", sys.executable))
    checked = subprocess.run([SYSTEMD, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)
    about_ours = [line for line in checked.stderr.splitlines() if "gapless.service" in line]
    assert about_ours == []


@contextmanager
def nginx(folder: Path, upstream_port: int) -> Iterator[int]:
    """nginx with the example's configuration, in the foreground, on a port of its own."""
    assert NGINX is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    text = (DEPLOY / "nginx.conf").read_text("utf-8")
    for old, new in (
        ("server 127.0.0.1:8000 ", f"server 127.0.0.1:{upstream_port} "),
        ("listen 8080;", f"listen 127.0.0.1:{port};"),
        ("/var/log/nginx/gapless.log", str(folder / "access.log")),
        ("http {", "http {" + "".join(f"{kind}_temp_path {folder}/{kind};" for kind in TEMPORARY)),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    # Its workers must be able to write below the test's own folder.
    user = "user root;" if os.geteuid() == 0 else ""
    head = f"daemon off; {user} pid {folder}/pid; error_log {folder}/error.log;\n"
    (folder / "nginx.conf").write_text(head + text)
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 20
        while True:
            assert process.poll() is None, (folder / "error.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.mark.skipif(NGINX is None, reason="needs nginx")
def test_streams_pass_through_nginx_as_they_come(tmp_path: Path) -> None:
    environment = {"GAPLESS_API_KEYS": KEY}
    with served(tmp_path / "log", *TINY, environment=environment) as server:
        server.wait_until_ready()
        with nginx(tmp_path, server.port) as port:
            _asks_through(port, server)
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def _asks_through(port: int, server: Served) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        body = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        first = answer.readline()
        assert first.startswith(b"data: {")
        metrics = server.ask("GET", "/metrics", Authorization=f"Bearer {KEY}")[1]
        assert re.search(r"^gapless_requests_running 1", metrics, re.MULTILINE), "the first event came before the last"
        assert answer.read().endswith(b"data: [DONE]\n\n")
        for path, status in (("/health", 200), ("/v1/models", 200), ("/metrics", 403)):
            connection.request("GET", path, headers=headers)
            got = connection.getresponse()
            got.read()
            assert (path, got.status) == (path, status)
        connection.request("POST", "/v1/completions", b'{"prompt": "' + b"a" * (7 << 20) + b'"}', headers)
        got = connection.getresponse()
        assert (got.status, json.loads(got.read())["error"]["type"]) == (400, "invalid_request_error")
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 401
