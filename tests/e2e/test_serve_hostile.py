"""Several hundred hostile requests against a real server, while a good one streams beside them."""

import http.client
import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from e2e.served_process import Served, served
from fixtures.served_models import chain, table_checkpoint
from unit.server.hostile_corpus import HostileRequest, hostile_requests

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
# What the largest bodies cost for a moment; allocators keep some of it.
GROWTH_MIB = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    # After each letter comes the next one, whatever else is in the batch; no answer ends by itself.
    table_checkpoint(folder, chain(*ALPHABET, "a"), chat_template=TEMPLATE, max_position_embeddings=4096)
    arguments = [str(folder), "--served-model-name", "letters", "--device", "cpu", "--num-blocks", "600", "--port", "0"]
    with served(folder / "log", *arguments) as running:
        running.wait_until_ready()
        yield running
        running.signal(signal.SIGTERM)
        assert running.end() == 0


def send(server: Served, request: HostileRequest) -> tuple[int, str]:
    """Send a request as it is, on a connection of its own; 0 where the server hung up."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.putrequest(
            request.method, request.path, skip_host="Host" in request.headers, skip_accept_encoding=True
        )
        headers = {"Content-Type": "application/json", "Content-Length": str(len(request.body)), **request.headers}
        for name, value in headers.items():
            connection.putheader(name, value.encode("latin-1"))
        try:
            connection.endheaders()
            connection.send(request.body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was refused before all of it was sent
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    except (ConnectionError, http.client.HTTPException):
        return 0, ""
    finally:
        connection.close()


class Neighbour(threading.Thread):
    """Streams answers one after the other and keeps their texts."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self.texts: list[str] = []
        self.enough = threading.Event()
        self._server = server

    def run(self) -> None:
        while not self.enough.is_set():
            with self._server.stream(500, prompt="xyza") as stream:
                events = stream.read().decode().split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
            self.texts.append("".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]))


def test_hostile_requests_are_refused_and_the_neighbour_feels_nothing(server: Served) -> None:
    corpus = hostile_requests()
    assert len(corpus) >= 300
    family = [process.pid for process in server.family()]
    neighbour = Neighbour(server)
    neighbour.start()
    before = _resident_mib(server)
    wrong = {}
    for request in corpus:
        status, text = send(server, request)
        if not 400 <= status < 500 or not _is_error(text, request) or _tells_too_much(text):
            wrong[request.name] = (status, text[:300])
    neighbour.enough.set()
    neighbour.join(60)
    assert not neighbour.is_alive()
    assert wrong == {}
    assert [process.pid for process in server.family()] == family, "nothing was restarted"
    assert _resident_mib(server) - before < GROWTH_MIB
    expected = (ALPHABET * 30)[1:501]
    assert len(neighbour.texts) >= 2
    assert set(neighbour.texts) == {expected}
    status, answer = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})
    assert (status, answer["choices"][0]["text"]) == (200, "bcd")
    metrics = server.ask("GET", "/metrics")[1]
    assert not re.search(r'^gapless_http_requests_total{.*status="5', metrics, re.MULTILINE)
    assert re.search(r"^gapless_requests_running 0", metrics, re.MULTILINE)
    assert re.search(r"^gapless_requests_waiting 0", metrics, re.MULTILINE)
    assert "Traceback" not in server.told


def _is_error(text: str, request: HostileRequest) -> bool:
    if request.method == "HEAD":
        return True
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 600


def _tells_too_much(text: str) -> bool:
    return any(word in text for word in ("Traceback", "site-packages", ".py", str(Path.home()), "object at 0x"))


def _resident_mib(server: Served) -> float:
    return sum(psutil.Process(process.pid).memory_info().rss for process in server.family()) / (1 << 20)
