"""What a client sees does not depend on who else is served: streams end, time-outs are kept, draws are one's own."""

import asyncio
import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from fixtures.api_server import MODEL, ApiServer
from fixtures.served_models import ROW_L, VOCAB, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from fixtures.waiting import until

TEXT = "/v1/completions"
NUM_ROWS = 4
MAX_MODEL_LEN = 4096
USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``a`` to ``e``, ``v`` to ``z`` and an end; ``Q`` for ever; ``R``, a draw of ROW-L and ``R`` again, for ever."""
    return table_checkpoint(
        tmp_path_factory.mktemp("neighbours"),
        rows(L=ROW_L, R=ROW_L, x={"R": 5.0}, y={"R": 5.0}, z={"R": 5.0}),
        chain(*"abcde", BYTE_EOS),
        chain(*"mnopq", BYTE_EOS),
        chain("Q", "Q"),
        max_position_embeddings=MAX_MODEL_LEN,
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ApiServer]:
    with ApiServer(folder, {"max_rows": NUM_ROWS, "num_blocks": NUM_ROWS * MAX_MODEL_LEN // 16}) as api:
        yield api


@contextmanager
def endless_stream(server: ApiServer, n: int = 1) -> Iterator[None]:
    """Holds ``n`` rows for some thousand steps, unless it is left before; its first token has come."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        body = {"prompt": "Q", "n": n, "max_tokens": MAX_MODEL_LEN - 1, "temperature": 0, "stream": True}
        connection.request("POST", TEXT, json.dumps(body), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            assert answer.readline().startswith(b"data: ")
            yield


def running_and_waiting(server: ApiServer) -> list[int]:
    counts = server.counters()
    return [counts.running, counts.waiting]


def test_c05_a_server_wakes_up_whenever_a_request_comes(folder: Path) -> None:
    with ApiServer(folder, {"num_blocks": 64}) as fresh:
        assert fresh.counters().steps == 0
        for _ in range(2):
            time.sleep(0.5)
            assert fresh.text("a") == "bcde"
            [_, last] = fresh.stream(TEXT, prompt="m", temperature=0, max_tokens=1, stream_options=USAGE)
            assert last["usage"]["completion_tokens"] == 1
        assert fresh.wait_until_idle()


def test_c05_streams_end_after_their_last_item_whatever_others_do(server: ApiServer) -> None:
    def one(index: int) -> str:
        *chunks, usage = server.stream(TEXT, prompt="am"[index % 2], temperature=0, stream_options=USAGE)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
        assert usage["usage"]["completion_tokens"] == 5
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    with ExitStack() as stack, ThreadPoolExecutor(20) as threads:
        for _ in range(2):
            stack.enter_context(endless_stream(server))
        # Each reads to the end of its body.
        assert list(threads.map(one, range(20), timeout=60)) == ["bcde", "nopq"] * 10
        assert server.counters().running == 2, "those that do not end are still there"
    assert server.wait_until_idle()


def test_c05_time_outs_are_kept_whatever_others_do(server: ApiServer) -> None:
    async def read(client: AsyncOpenAI) -> None:
        stream = await client.completions.create(
            model=MODEL, prompt="Q", temperature=0, max_tokens=MAX_MODEL_LEN - 1, stream=True
        )
        async with stream:
            async for _ in stream:
                pass

    async def impatient(client: AsyncOpenAI, limit_s: float) -> float:
        began_s = time.perf_counter()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(client), limit_s)
        return time.perf_counter() - began_s - limit_s

    async def crowd() -> float:
        """Twice as many as there are rows, so half of them wait for theirs; how late the last one was."""
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return max(await asyncio.gather(*(impatient(client, 0.2 + 0.05 * i) for i in range(2 * NUM_ROWS))))

    late_s = []
    for _ in range(3):  # a machine that is busy with other things makes anybody late
        late_s.append(asyncio.run(crowd()))
        assert server.wait_until_idle()
        if late_s[-1] < 0.2:
            break
    assert min(late_s) < 0.2
    assert server.text("a") == "bcde"


@pytest.mark.parametrize(
    "batch",
    [
        [{"temperature": 0}, {"top_k": 1}, {"top_k": VOCAB + 5}, {"top_k": 0}],
        [{"top_k": -1}, {"top_k": 2}, {"temperature": 0, "top_k": 3}, {"top_k": 10**18}],
    ],
)
def test_c20_a_neighbours_top_k_never_affects_you(server: ApiServer, batch: list[dict[str, Any]]) -> None:
    def draws(index: int) -> str:
        options = {"temperature": 1, "seed": index, "max_tokens": 200, **batch[index]}
        return str(server.ok(TEXT, prompt="R", **options)["choices"][0]["text"])

    alone = [draws(index) for index in range(NUM_ROWS)]
    with ThreadPoolExecutor(NUM_ROWS) as threads:
        with endless_stream(server, n=NUM_ROWS):  # all rows are taken: the batch waits, and is let in together
            futures = [threads.submit(draws, index) for index in range(NUM_ROWS)]
            until(lambda: running_and_waiting(server) == [NUM_ROWS, NUM_ROWS])
        assert [future.result(60) for future in futures] == alone
    for options, text in zip(batch, alone, strict=True):
        expected = {1: "x", 2: "xy"}.get(options.get("top_k", 0), "xyz")
        assert set(text[::2]) == set("x" if options.get("temperature") == 0 else expected)
        assert set(text[1::2]) == {"R"}
