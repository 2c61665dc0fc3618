"""A client that goes away takes its generation along, whatever it was waiting for."""

import json
import socket
import time
from typing import Any

import pytest

from fixtures.api_server import ApiServer

ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 250, "ignore_eos": True}


def send_and_leave(server: ApiServer, path: str, fields: dict[str, Any]) -> None:
    """Post, wait until the engine works on it, and close the connection."""
    steps = server.counters().steps
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        if fields.get("stream"):
            assert b"200 OK" in connection.recv(200)
        while server.counters().steps == steps:
            time.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Q"}),
        ("/v1/completions", {"prompt": "Q", "n": 3}),
        ("/v1/completions", {"prompt": ["Q"] * 4, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"81": 100}}),
    ],
)
def test_c54_generation_stops(server: ApiServer, path: str, fields: dict[str, Any], stream: bool) -> None:
    before = server.counters().output_tokens
    for _ in range(3):
        send_and_leave(server, path, {**ENDLESS, **fields, "stream": stream})
    assert server.wait_until_idle()
    prompts = fields["prompt"] if isinstance(fields.get("prompt"), list) else ["one"]
    num_choices = 3 * len(prompts) * fields.get("n", 1)
    assert server.counters().output_tokens - before < num_choices * ENDLESS["max_tokens"] / 2
    server.assert_serves()


def test_c54_a_neighbour_goes_on(server: ApiServer) -> None:
    expected = server.complete("Q", max_tokens=200)
    for _ in range(5):
        send_and_leave(server, "/v1/completions", {**ENDLESS, "prompt": ["Q"] * 8, "stream": True})
    assert server.complete("Q", max_tokens=200)["choices"] == expected["choices"]
    assert server.wait_until_idle()


def test_c54_a_response_that_nobody_waits_for(server: ApiServer) -> None:
    send_and_leave(server, "/v1/responses", {"input": "x", "stream": True})
    send_and_leave(server, "/v1/responses", {"input": "x"})
    assert server.wait_until_idle()
    server.assert_serves()
