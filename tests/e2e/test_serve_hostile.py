"""Several hundred hostile requests against a real server, while a good one streams beside them.

What the server owes to everybody else is measured from outside: the gaps of a stream by a process that does nothing
else, the memory of both processes every 20 ms, and after each hostile request a good one.
"""

import http.client
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from e2e.served_process import Served, served
from e2e.stream_reader import StreamReader, assert_at_least_once
from fixtures.served_models import chain, table_checkpoint
from gapless.server.json_bodies import MAX_VALUES
from unit.server.hostile_corpus import HostileRequest, hostile_requests, requests_naming
from unit.server.hostile_messages import hostile_messages
from unit.server.live_server import receive_all, status_of
from unit.server.live_server import send as send_bytes

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
MAX_GAP_S = 0.25
# Of a stream that is disturbed by nobody, on a machine that is: the server is not to be blamed for less.
BASELINES = 3
# The server holds the interpreter's lock for 60 ms at most, but a crowd takes its share of the cores. On two of them
# the largest gap is 60 to 220 ms at a load of 4, 110 to 250 ms at 8; at 11, with this test three times at once, every
# fourth try is above the limit, which then says little of the server.
TRIES_OF_A_CROWD = 5
MEMORY_PER_BYTE = 20
# What many small requests cost: allocators keep some of each, in an arena for each thread.
ALLOWANCE_MIB = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    # After each letter comes the next one, whatever else is in the batch; no answer ends by itself.
    table_checkpoint(folder, chain(*ALPHABET, "a"), chat_template=TEMPLATE, max_position_embeddings=4096)
    arguments = [str(folder), "--served-model-name", "letters", "--device", "cpu", "--num-blocks", "600", "--port", "0"]
    with served(folder / "log", *arguments) as running:
        running.wait_until_ready()
        family = [process.pid for process in running.family()]
        yield running
        assert [process.pid for process in running.family()] == family, "nothing was restarted"
        metrics = running.ask("GET", "/metrics")[1]
        assert not re.search(r'^gapless_http_requests_total{.*status="5', metrics, re.MULTILINE)
        assert re.search(r"^gapless_requests_running 0", metrics, re.MULTILINE)
        assert re.search(r"^gapless_requests_waiting 0", metrics, re.MULTILINE)
        running.signal(signal.SIGTERM)
        assert running.end() == 0
        assert "Traceback" not in running.told


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


class GoodClient:
    """Sends a short request on a connection that stays open, and knows the answer."""

    def __init__(self, server: Served) -> None:
        self._connection = server.connect()

    def close(self) -> None:
        self._connection.close()

    def succeeds(self) -> bool:
        body = json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0})
        self._connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        with self._connection.getresponse() as answer:
            content = json.loads(answer.read())
            return answer.status == 200 and content["choices"][0]["text"] == "b"


class ResidentMemory(threading.Thread):
    """Keeps how much memory the server's processes have, together, while the context lasts."""

    def __init__(self, server: Served) -> None:
        super().__init__(name="resident-memory", daemon=True)
        self._processes = server.family()
        self._ended = threading.Event()
        self._peak_bytes = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self._peak_bytes = max(self._peak_bytes, self.now_bytes())

    def now_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)

    def begin(self) -> int:
        """Forget the peak; return what there is now."""
        self._peak_bytes = self.now_bytes()
        return self._peak_bytes

    def peak_bytes(self) -> int:
        """The most since :meth:`begin`."""
        return max(self._peak_bytes, self.now_bytes())


class Neighbour(StreamReader):
    """The stream that must not feel anything; an undisturbed second first, to know the machine."""

    def __init__(self, server: Served) -> None:
        super().__init__(server.port, prompt="xyza", max_tokens=500, least=2)
        self._began_s = self._disturbed_s = self._ended_s = 0.0

    def __enter__(self) -> Self:
        super().__enter__()
        self._began_s = time.monotonic()
        time.sleep(1)
        self._disturbed_s = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended_s = time.monotonic()
        super().__exit__(kind, error, trace)

    def felt_nothing(self) -> bool:
        """Whether its text was right, which is asserted, and its largest gap small."""
        *whole, last = self.streams
        expected = (ALPHABET * 30)[1:501]
        assert len(whole) >= 2
        assert {(stream.status, stream.text, stream.finish_reason) for stream in whole} == {(200, expected, "length")}
        assert expected.startswith(last.text)
        baseline_s = max(self.gaps_s(self._began_s, self._disturbed_s))
        gap_s = max(self.gaps_s(self._disturbed_s, self._ended_s))
        print(f"largest gap: {gap_s * 1e3:.0f} ms, undisturbed {baseline_s * 1e3:.0f} ms")
        return gap_s < max(MAX_GAP_S, BASELINES * baseline_s)


def _one_after_another(server: Served) -> bool:
    """Whether a neighbour felt nothing of the corpus; all else that is promised is asserted."""
    corpus = hostile_requests()
    assert sum(map(len, corpus.values())) >= 300
    wrong, growth = {}, {}
    with Neighbour(server) as neighbour, ResidentMemory(server) as memory, closing(GoodClient(server)) as good:
        for kind, requests in corpus.items():
            before = memory.begin()
            for request in requests:
                wrong.update(_misanswered(request, *send(server, request)))
                assert good.succeeds(), request.name
            growth[kind] = (memory.peak_bytes() - before, sum(len(request.body) for request in requests))
    assert wrong == {}
    _assert_little_memory(growth)
    return neighbour.felt_nothing()


def _raw_bytes(server: Served) -> bool:
    """The same of messages that are hardly HTTP."""
    with Neighbour(server) as neighbour, ResidentMemory(server) as memory, closing(GoodClient(server)) as good:
        before, num_bytes = memory.begin(), 0
        for name, message in hostile_messages(8 << 20).items():
            with server.dial() as connection:
                num_bytes += send_bytes(connection, message.data)
                answer = receive_all(connection)
            assert status_of(answer) == message.status, name
            assert answer.count(b"HTTP/1.1 ") == 1, f"{name}: what is behind it was taken for a request"
            assert _is_error(answer.partition(b"\r\n\r\n")[2].decode()), name
            assert good.succeeds(), name
        growth = {"bytes": (memory.peak_bytes() - before, num_bytes)}
    _assert_little_memory(growth)
    return neighbour.felt_nothing()


def _eight_at_a_time(server: Served) -> bool:
    """The same of many of the largest, so that some are read while others are tokenised, and some of the rest."""
    corpus = hostile_requests()
    largest = corpus.pop("bodies as long as they may be")
    requests = [*largest[:24], *[request for kind in corpus.values() for request in kind][::5]]
    with (
        Neighbour(server) as neighbour,
        ResidentMemory(server) as memory,
        closing(GoodClient(server)) as good,
        ThreadPoolExecutor(8) as clients,
    ):
        before, wrong = memory.begin(), {}
        for start in range(0, len(requests), 8):
            batch = requests[start : start + 8]
            for request, answer in zip(batch, clients.map(lambda each: send(server, each), batch), strict=True):
                wrong.update(_misanswered(request, *answer))
            assert good.succeeds(), [request.name for request in batch]
        growth = {"at once": (memory.peak_bytes() - before, sum(len(request.body) for request in requests))}
    assert wrong == {}
    _assert_little_memory(growth)
    return neighbour.felt_nothing()


@pytest.mark.parametrize("token", [7, 300])
def test_a_million_ids_are_decoded_in_little_memory(server: Served, token: int) -> None:
    """The text is three times as long as the request, in JSON, or (300 has no token) there is none.

    The first of these tests: what larger requests leave in the allocators would do for a million ids, too.
    """
    text = "" if token == 300 else chr(token)

    def decoded(count: int) -> int:
        """Decode so many ids; return the bytes that were sent."""
        body = b'{"tokens":[%b]}' % b",".join([b"%d" % token] * count)
        request = HostileRequest(name=f"{count} ids", path="/detokenize", body=body)
        status, answer = send(server, request)
        assert (status, json.loads(answer)) == (200, {"prompt": text * count})
        return len(body)

    decoded(5000)
    with ResidentMemory(server) as memory:
        before = memory.begin()
        sent = decoded(MAX_VALUES - 8)
        grown = memory.peak_bytes() - before
    print(f"{sent / (1 << 20):.1f} MiB sent, {grown / sent:.1f} times as much more memory at most")
    assert grown < MEMORY_PER_BYTE * sent


def test_hostile_requests_are_refused_and_the_neighbour_feels_nothing(server: Served) -> None:
    assert_at_least_once(lambda: _one_after_another(server))


def test_hostile_bytes_are_refused_and_the_neighbour_feels_nothing(server: Served) -> None:
    assert_at_least_once(lambda: _raw_bytes(server))


def test_hostile_requests_at_once_are_refused_and_the_neighbour_feels_nothing(server: Served) -> None:
    assert_at_least_once(lambda: _eight_at_a_time(server), TRIES_OF_A_CROWD)


def test_no_address_in_a_request_is_ever_asked(server: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/secret"
        for field, requests in requests_naming(url).items():
            for request in requests:
                status, text = send(server, request)
                answer = json.loads(text)
                if not field:
                    assert status == 200, text
                    continue
                assert status == (404 if field == "model" else 400), (request.name, text)
                assert answer["error"]["param"].startswith(field), (request.name, text)
        with server.dial() as connection:
            send_bytes(connection, f"GET {url} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            assert 400 <= status_of(receive_all(connection)) < 500, "it is no proxy either"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has called
            listener.accept()


def _assert_little_memory(growth: dict[str, Sequence[int]]) -> None:
    """By what was sent: the bytes of growth, and those that were sent."""
    for what, (grown, sent) in growth.items():
        print(f"{what}: {sent / (1 << 20):.1f} MiB sent, {grown / (1 << 20):.1f} MiB more memory at most")
        assert grown < MEMORY_PER_BYTE * sent + (ALLOWANCE_MIB << 20), what


def _misanswered(request: HostileRequest, status: int, text: str) -> dict[str, tuple[int, str]]:
    """The answer by the request's name, if it is not what it must be."""
    is_error = request.method == "HEAD" or _is_error(text)
    is_right = 400 <= status < 500 and is_error and not _tells_too_much(text)
    return {} if is_right else {request.name: (status, text[:300])}


def _is_error(text: str) -> bool:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 600


def _tells_too_much(text: str) -> bool:
    return any(word in text for word in ("Traceback", "site-packages", ".py", str(Path.home()), "object at 0x"))
