"""Too many requests, and an engine that has died: refused in the form of every error, and nobody waits for ever."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fixtures.api_server import ApiServer, sse_events
from fixtures.served_models import ROW_L, chain, rows, table_checkpoint

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def narrow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Runs one request at a time and lets two wait. ``Q`` goes on for ever."""
    folder = table_checkpoint(tmp_path_factory.mktemp("narrow"), rows(L=ROW_L), chain("Q", "Q"))
    with ApiServer(folder, {"max_rows": 1, "max_waiting": 2}) as api:
        yield api


def test_a_full_queue_is_told(narrow_server: ApiServer) -> None:
    replies = []

    def ask() -> None:
        replies.append(narrow_server.post(TEXT, prompt="Q", max_tokens=300, temperature=0))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    refused = [reply for reply in replies if reply.status == 429]
    served = [reply for reply in replies if reply.status == 200]
    assert len(refused) + len(served) == 12
    assert served
    assert refused
    for reply in refused:
        assert reply.error["type"] == "rate_limit_error"
        assert reply.error["code"] == "queue_full"
        assert int(reply.headers["retry-after"]) >= 1
    for reply in served:
        assert reply.content["choices"][0]["text"] == "Q" * 300
    narrow_server.assert_serves()


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_list_that_is_too_long_for_the_queue_nothing_runs(narrow_server: ApiServer, stream: bool) -> None:
    reply = narrow_server.post(TEXT, prompt=["Q"] * 50, max_tokens=300, stream=stream)
    assert reply.status == 429
    assert reply.error["code"] == "queue_full"
    assert narrow_server.wait_until_idle()
    narrow_server.assert_serves()


def test_a_dead_engine_fails_everybody(narrow_server: ApiServer) -> None:
    """The last test of the module, since the engine does not come back."""
    assert narrow_server.context is not None
    engine = narrow_server.context.client.engine_pid
    assert engine is not None
    streamed, waiting = [], []
    threads = [
        threading.Thread(target=lambda: streamed.append(narrow_server.post(TEXT, prompt="Q", stream=True, **ENDLESS))),
        threading.Thread(target=lambda: waiting.append(narrow_server.post(TEXT, prompt="Q", **ENDLESS))),
    ]
    os.kill(engine, signal.SIGSTOP)  # so that the requests are there when it dies
    for thread in threads:
        thread.start()
    threads[0].join(0.3)
    os.kill(engine, signal.SIGKILL)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for reply in [*streamed, *waiting]:
        if reply.status == 200:  # the stream had begun
            *_, (_, error), done = sse_events(reply.raw)
            assert done == (None, "[DONE]")
            assert json.loads(error)["error"]["code"] == "engine_dead"
        else:
            assert reply.status == 503
            assert reply.error["type"] == "server_error"
    for path, fields in ((TEXT, {"prompt": "L"}), ("/v1/completions", {"prompt": ["L", "L"], "stream": True})):
        reply = narrow_server.post(path, **fields)
        assert reply.status == 503
        assert reply.error["code"] == "engine_dead"
    assert narrow_server.get("/health").status == 503


ENDLESS = {"max_tokens": 400, "temperature": 0}
