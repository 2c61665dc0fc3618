"""A server with as much to read as it takes: ``/health`` answers, and streams go on, as if there were nothing."""

import json
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from e2e.served_process import Served, served
from e2e.stream_reader import StreamReader, assert_at_least_once
from fixtures.served_models import chain, table_checkpoint
from fixtures.tokenizers import CHATML

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "server"))

from health_probe import HealthProbe

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
MAX_BODY_BYTES = 11_000_000
CONTEXT = 2048
HEALTH_WITHIN_MS = 500
MAX_GAP_S = 1.0
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model")
    table_checkpoint(folder, chain(*ALPHABET, "a"), chat_template=CHATML, max_position_embeddings=CONTEXT)
    arguments = [str(folder), "--device", "cpu", "--num-blocks", "1024", "--port", "0"]
    with served(folder / "log", *arguments, "--max-body-bytes", str(MAX_BODY_BYTES)) as running:
        running.wait_until_ready()
        yield running
        running.signal(signal.SIGTERM)
        assert running.end() == 0
        assert "Traceback" not in running.told


def post(server: Served, path: str, body: bytes) -> tuple[int, Any]:
    """Send a body that exists already; 413 may come before all of it is sent."""
    with closing(server.connect()) as connection:
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.send(body)
        with connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())


def went_on(reader: StreamReader) -> bool:
    """Whether no stream stood still, its first token included; that each was right is asserted."""
    expected = (ALPHABET * 60)[:1000]
    assert reader.streams
    for stream in reader.streams:
        assert stream.status == 200
        assert expected.startswith(stream.text)
        assert stream.text == expected or not stream.is_whole
    return all(after - before < MAX_GAP_S for stream in reader.streams for before, after in pairwise(stream.times_s))


def test_c58_health_answers_and_streams_go_on_beside_eight_prompts_of_ten_megabytes(server: Served) -> None:
    assert_at_least_once(lambda: _nobody_waits_beside_large_prompts(server))


@pytest.mark.parametrize("stream", [False, True])
def test_c41_bodies_around_the_size_limit_are_refused_beside_a_stream(server: Served, stream: bool) -> None:
    assert_at_least_once(lambda: _nobody_waits_beside_large_bodies(server, stream))


def _nobody_waits_beside_large_prompts(server: Served) -> bool:
    size = 10_000_000
    bodies = {
        TEXT: b'{"max_tokens": 4, "prompt": "%b"}' % (b"word " * (size // 5)),
        CHAT: b'{"max_tokens": 4, "messages": [{"role": "user", "content": "%b"}]}' % (b"a" * size),
    }
    # And as many that the model takes: they are read, tokenised and computed.
    fitting = b'{"max_tokens": 4, "ignore_eos": true, "prompt": "%b"}' % (b"z" * (CONTEXT - 8))
    with (
        StreamReader(server.port, prompt="xyz", max_tokens=1000) as first,
        StreamReader(server.port, prompt="z", max_tokens=1000) as second,
        HealthProbe(server.port, 0.05) as probe,
        ThreadPoolExecutor(16) as clients,
    ):
        refused = [clients.submit(post, server, path, body) for path, body in list(bodies.items()) * 4]
        answered = [clients.submit(post, server, TEXT, fitting) for _ in range(8)]
        for each in refused:
            status, answer = each.result(60)
            assert status == 400
            assert answer["error"]["code"] == "context_length_exceeded"
        for each in answered:
            status, answer = each.result(60)
            assert (status, answer["usage"]["prompt_tokens"]) == (200, CONTEXT - 8)
    latency_ms = max(answer.latency_ms for answer in probe.answers)
    print(f"the slowest of {len(probe.answers)} answers of /health: {latency_ms:.0f} ms")
    assert len(probe.answers) >= 3
    assert {answer.status for answer in probe.answers} == {200}
    return went_on(first) and went_on(second) and latency_ms < HEALTH_WITHIN_MS


def _nobody_waits_beside_large_bodies(server: Served, stream: bool) -> bool:
    def body(num_bytes: int) -> bytes:
        head = b'{"stream": %b, "prompt": "' % json.dumps(stream).encode()
        return head + b"a" * (num_bytes - len(head) - 2) + b'"}'

    with StreamReader(server.port, prompt="z", max_tokens=1000) as reader:
        for num_bytes, status, words in (
            (MAX_BODY_BYTES, 400, ("more than 65536 tokens", f"holds {CONTEXT}")),
            (MAX_BODY_BYTES + 1, 413, (str(MAX_BODY_BYTES),)),
            (20_000_000, 413, (str(MAX_BODY_BYTES),)),
        ):
            found, answer = post(server, TEXT, body(num_bytes))
            assert found == status
            for each in words:
                assert each in answer["error"]["message"]
            found, answer = server.ask("POST", TEXT, {"prompt": "a", "max_tokens": 3, "temperature": 0})
            assert (found, answer["choices"][0]["text"]) == (200, "bcd")
        time.sleep(0.1)
    return went_on(reader)
