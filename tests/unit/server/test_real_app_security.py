"""The guards around the real app and a real engine: keys, deadlines, limits, origins, hosts, faults and ids."""

import json
import logging
import os
import re
import signal
import string
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route

from fixtures.api_server import ApiServer, sse_events
from fixtures.served_models import chain, table_checkpoint
from fixtures.tokenizers import CHATML
from gapless.server.choice_text import ChoiceText
from gapless.server.engine_client import ServedModelClient
from gapless.server.generation import Generation
from gapless.server.probes import guarded_routes, public_routes
from gapless.server.settings import ServerSettings
from unit.server.live_server import status_of
from unit.server.real_app import Door
from unit.server.test_security import RAW_TARGETS

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
KEYS = ("first-key-0123", "second-key-4567")
GOOD = {"Authorization": f"Bearer {KEYS[1]}"}
USER = [{"role": "user", "content": "A"}]
# A good request for each route that takes one.
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    TEXT: {"prompt": "A", "max_tokens": 2},
    RESPONSES: {"input": "A", "max_output_tokens": 2},
    "/tokenize": {"prompt": "A"},
    "/detokenize": {"tokens": [65]},
}
API_PAGE = Path(__file__).parents[3] / "docs" / "server" / "api.md"
# Far more than can be generated while a test waits for the end of something.
ENDLESS = 8000


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Every capital letter goes on for ever: ``Q`` is followed by ``QQQQ...``, for thousands of tokens."""
    folder = table_checkpoint(
        tmp_path_factory.mktemp("letters"),
        *(chain(letter, letter) for letter in string.ascii_uppercase),
        chain("\n", "A"),
        chat_template=CHATML,
        max_position_embeddings=2 * ENDLESS,
    )
    with ApiServer(folder, {"num_blocks": 1100}) as api:
        yield api


@pytest.fixture(scope="module")
def locked(letters: ApiServer) -> Iterator[Door]:
    """A door with keys."""
    with Door(letters, ServerSettings(api_keys=KEYS)) as door:
        yield door


@pytest.fixture(scope="module")
def unlocked(letters: ApiServer) -> Iterator[Door]:
    """A door without."""
    with Door(letters, ServerSettings()) as door:
        yield door


# --- keys ---------------------------------------------------------------------------------------------------------

PUBLIC = {("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready"), ("HEAD", "/ready")}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
WRONG = ("Bearer wrong", KEYS[0], f"Basic {KEYS[0]}", f"Bearer {KEYS[0]}x", "")


def routes_below(routes: Sequence[BaseRoute]) -> Iterator[Route]:
    """Every route, those of included routers too."""
    for route in routes:
        inner = getattr(route, "original_router", None)  # as later versions of FastAPI include a router
        if inner is not None:
            yield from routes_below(inner.routes)
        else:
            assert isinstance(route, Route), "a mount has routes of its own: decide who may use them"
            yield route


def every_path(door: Door) -> dict[str, str]:
    """The path of every route there is, of the app and before it, and one that it matches."""
    routes = [*door.app.routes, *public_routes(door.context), *guarded_routes(door.context)]
    return {route.path: re.sub(r"\{.*?\}", "tiny", route.path) for route in routes_below(routes)}


def test_c57_every_route_of_the_app_and_before_it_asks_for_the_key(locked: Door) -> None:
    steps = locked.server.counters().steps
    paths = every_path(locked)
    assert paths.keys() >= {"/openapi.json", "/metrics", "/version", "/v1/models/{model:path}", *BODIES}
    for path in paths.values():
        for method in METHODS:
            body = BODIES.get(path) if method == "POST" else None
            for value in (None, *WRONG):
                reply = locked.ask(method, path, body, {} if value is None else {"Authorization": value})
                if (method, path) in PUBLIC:
                    assert reply.status == 200
                    continue
                assert (method, path, value, reply.status) == (method, path, value, 401)
                assert reply.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert reply.error["code"] == "invalid_api_key"
                assert KEYS[0].encode() not in reply.raw
    assert locked.server.counters().steps == steps, "nothing reached the engine"


def test_c57_with_the_key_every_route_answers(locked: Door) -> None:
    served = set()
    for path in every_path(locked).values():
        for method in METHODS:
            reply = locked.ask(method, path, BODIES.get(path) if method == "POST" else None, GOOD)
            assert reply.status in (200, 404, 405), (method, path, reply.raw)
            if reply.status == 200:
                served.add((method, path))
    # One that answers without a key, or that is not written down here, fails this test until it has been decided.
    gets = ("/openapi.json", "/metrics", "/version", "/v1/models", "/v1/models/tiny")
    expected = {("GET", path) for path in gets} | {("POST", path) for path in BODIES} | PUBLIC
    assert {each for each in served if each[0] != "HEAD"} == {each for each in expected if each[0] != "HEAD"}


def test_every_route_is_told_in_the_document(locked: Door) -> None:
    table = API_PAGE.read_text("utf-8").split("\n## ", 1)[0]
    told = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", table))
    assert {path.replace(":path", "") for path in every_path(locked)} == told | {"/openapi.json"}


def test_c57_a_body_without_a_key_is_not_looked_at(locked: Door) -> None:
    for path in BODIES:
        for body in (b"{", b'{"prompt": NaN}', b"\xff" * 100):
            head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            assert status_of(locked.exchange(head.encode() + body)) == 401
    told = locked.ask("GET", "/metrics", headers=GOOD).raw.decode()
    assert re.search(r'^gapless_http_refusals_total{reason="key"} [1-9]', told, re.MULTILINE)
    assert not [key for key in KEYS if key in told]


TRICKS = [
    *RAW_TARGETS,
    *(b"//v1/chat/completions", b"/v1//completions", b"/V1/completions", b"/v1/completions/", b"/v1/Completions"),
    *(b"/v1%2fcompletions", b"/v1/%63ompletions", b"/health/..%2fv1/completions", b"/ready/../v1/completions"),
    *(b"/v1/completions%00", b"/v1/completions;health", b"/./v1/completions", b"/v1/x/../completions"),
    *(b"http://127.0.0.1//v1/completions", b"HTTP://127.0.0.1/v1/completions", b"https://a/v1/completions"),
    *(b"//health", b"//127.0.0.1/health", b"/health/v1/completions", b"/metrics?/health", b"/openapi.json/", b"*"),
]


def test_c57_tricks_with_the_target_lead_around_no_key(locked: Door) -> None:
    """As bytes on the wire, since a client library would tidy them up."""
    steps = locked.server.counters().steps
    body = json.dumps(BODIES[TEXT]).encode()
    for target in TRICKS:
        for method in (b"GET", b"POST", b"HEAD", b"OPTIONS"):
            content = body if method == b"POST" else b""
            head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
            head = head % (method, target) + b"Content-Length: %d\r\n" % len(content)
            refused = locked.exchange(head + b"X-Original-URL: /health\r\nX-Rewrite-URL: /health\r\n\r\n" + content)
            assert status_of(refused) == 401, (method, target)
            key = b"Authorization: Bearer " + KEYS[0].encode()
            assert status_of(locked.exchange(head + key + b"\r\n\r\n" + content)) in (200, 404, 405), (method, target)
    assert locked.server.counters().steps > steps, "with a key some of them are requests"


def test_c57_a_route_that_is_added_later_is_guarded(letters: ApiServer) -> None:
    seen = []

    async def later() -> str:
        seen.append("route")
        return "later"

    def mounted(request: Any) -> PlainTextResponse:
        seen.append("mount")
        return PlainTextResponse("mounted")

    with Door(letters, ServerSettings(api_keys=KEYS)) as door:
        door.app.add_api_route("/later", later, methods=["GET", "POST"])
        door.app.add_api_route("/health/later", later, methods=["GET", "POST"])
        door.app.mount("/inner", Starlette(routes=[Route("/health", mounted), Route("/metrics", mounted)]))
        for path in ("/later", "/health/later", "/inner/health", "/inner/metrics", "/inner"):
            for method in ("GET", "POST"):
                assert door.ask(method, path).status == 401
        assert not seen
        assert door.ask("POST", "/later", headers=GOOD).status == 200
        assert door.ask("GET", "/inner/metrics", headers=GOOD).raw == b"mounted"
        assert seen == ["route", "mount"]


# --- how long and how many ----------------------------------------------------------------------------------------


def test_the_deadline_of_a_request_ends_its_generation(letters: ApiServer) -> None:
    body = {"prompt": "Q", "max_tokens": ENDLESS, "temperature": 0}
    with Door(letters, ServerSettings(request_timeout_s=1.0)) as door, ThreadPoolExecutor(3) as pool:
        whole = pool.submit(door.ask, "POST", TEXT, {**body, "n": 2})
        stream = pool.submit(door.ask, "POST", TEXT, {**body, "stream": True})
        response = pool.submit(
            door.ask, "POST", RESPONSES, {"input": "Q", "stream": True, "max_output_tokens": ENDLESS}
        )
        late = whole.result()
        assert late.status == 504
        assert late.error["code"] == "request_timeout"
        assert late.headers["x-should-retry"] == "false"
        *begun, (_, error), done = sse_events(stream.result().raw)
        assert begun
        assert json.loads(begun[0][1])["choices"][0]["text"].startswith("Q")
        assert json.loads(error)["error"]["code"] == "request_timeout"
        assert done == (None, "[DONE]")
        *begun, (name, error) = sse_events(response.result().raw)
        assert begun
        assert name == "error"
        assert json.loads(error)["code"] == "request_timeout"
        assert letters.wait_until_idle(), "the engine goes on with nothing of it"
        assert door.context.gate.num_running == 0
        assert door.ask("POST", TEXT, BODIES[TEXT]).status == 200


def test_at_the_limit_of_requests_one_more_is_told_when_to_come_again(letters: ApiServer) -> None:
    with Door(letters, ServerSettings(max_concurrent_requests=1)) as door:
        with closing(door.connect()) as connection:
            stream = json.dumps({"prompt": "Q", "max_tokens": ENDLESS, "temperature": 0, "stream": True})
            connection.request("POST", TEXT, stream, {"Content-Type": "application/json"})
            running = connection.getresponse()
            assert running.status == 200
            for path, body in BODIES.items():
                full = door.ask("POST", path, body)
                assert (full.status, full.headers["retry-after"]) == (429, "1")
                assert full.error["code"] == "too_many_requests"
            for path in ("/v1/models", "/health", "/ready", "/metrics"):
                assert door.ask("GET", path).status == 200, "it makes no work"
            running.close()
        deadline_s = time.monotonic() + 30
        while (after := door.ask("POST", TEXT, BODIES[TEXT])).status == 429:
            assert time.monotonic() < deadline_s, "the place of a client that left stays taken"
        assert after.content["choices"][0]["text"] == "AA"
    assert letters.wait_until_idle()


def test_probes_answer_while_the_engine_cannot(letters: ApiServer, unlocked: Door) -> None:
    engine = unlocked.context.client.engine_pid
    assert engine is not None
    assert unlocked.ask("GET", "/metrics").status == 200
    os.kill(engine, signal.SIGSTOP)
    try:
        for path in ("/health", "/ready", "/version", "/v1/models"):
            assert unlocked.ask("GET", path).status == 200
        figures = unlocked.ask("GET", "/metrics")
        assert figures.status == 200
        assert b"gapless_engine_up 1.0" in figures.raw, "the last figures are shown again"
    finally:
        os.kill(engine, signal.SIGCONT)
    assert unlocked.ask("POST", TEXT, BODIES[TEXT]).status == 200
    assert letters.wait_until_idle()


def test_a_stream_can_be_seen_in_the_metrics_while_it_runs(letters: ApiServer) -> None:
    def figures(door: Door) -> dict[str, float]:
        lines = door.ask("GET", "/metrics").raw.decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name[0] != "#"}

    with Door(letters, ServerSettings()) as door, closing(door.connect()) as connection:
        stream = json.dumps({"prompt": "QQQ", "max_tokens": ENDLESS, "temperature": 0, "stream": True})
        connection.request("POST", TEXT, stream, {"Content-Type": "application/json"})
        running = connection.getresponse()
        assert b"Q" in running.readline()
        got = figures(door)
        assert got["gapless_prompt_tokens_total"] == 3
        assert got["gapless_request_prompt_tokens_count"] == 1
        assert got["gapless_queue_time_seconds_count"] == got["gapless_time_to_first_token_seconds_count"] == 1
        assert got["gapless_generation_tokens_total"] >= 1
        assert got["gapless_requests_running"] == 1
        assert got["gapless_request_duration_seconds_count"] == 0, "it has not ended"
        running.close()
    assert letters.wait_until_idle()


# --- origins and hosts --------------------------------------------------------------------------------------------

PAGE = "https://app.example"


def test_pages_of_other_origins_may_ask_only_if_they_are_named(letters: ApiServer, locked: Door) -> None:
    def headers_of(door: Door, method: str, origin: str, **headers: str) -> tuple[int, set[str]]:
        body = BODIES[TEXT] if method == "POST" else None
        reply = door.ask(method, TEXT, body, {"Origin": origin, **headers})
        return reply.status, {name for name in reply.headers if name.startswith("access-control-")}

    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    assert headers_of(locked, "OPTIONS", PAGE, **asks) == (401, set())
    assert headers_of(locked, "POST", PAGE, **GOOD) == (200, set())
    with Door(letters, ServerSettings(api_keys=KEYS, cors_origins=(PAGE,))) as door:
        allowed = door.ask("OPTIONS", TEXT, headers={"Origin": PAGE, **asks})
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
        assert door.ask("POST", TEXT, BODIES[TEXT], {"Origin": PAGE}).status == 401, "and the key as well"
        answer = door.ask("POST", TEXT, BODIES[TEXT], {"Origin": PAGE, **GOOD})
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        for other in ("https://evil.example", f"{PAGE}.evil.example", "null"):
            assert "access-control-allow-origin" not in headers_of(door, "OPTIONS", other, **asks)[1]
            assert "access-control-allow-origin" not in headers_of(door, "POST", other, **GOOD)[1]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "[::1].evil.example:80", "", "user@localhost"]
)
def test_without_keys_a_page_with_a_name_of_its_own_reaches_no_route(unlocked: Door, host: str) -> None:
    steps = unlocked.server.counters().steps
    for path in every_path(unlocked).values():
        for method in ("GET", "POST"):
            reply = unlocked.ask(method, path, BODIES.get(path) if method == "POST" else None, {"Host": host})
            if (method, path) in PUBLIC:
                assert reply.status == 200
            else:
                assert reply.status == 403, (method, path)
                assert reply.error["code"] == "host_not_allowed"
    assert unlocked.server.counters().steps == steps
    assert unlocked.ask("POST", TEXT, BODIES[TEXT], {"Host": "localhost:8000"}).status == 200


# --- faults -------------------------------------------------------------------------------------------------------

SECRET = "/home/secret/model.safetensors"
MESSAGE = "the server failed on this request; its log has the reason"


def fault(*_: object, **__: object) -> Any:
    """Raise what nobody expects, with a path in its text and an object in its arguments."""
    raise FileNotFoundError(2, f"{SECRET} by {object()!r}", SECRET)


def logged_ids(caplog: pytest.LogCaptureFixture, message: str) -> list[str | None]:
    """The request's id in each line with a message."""
    lines = [record for record in caplog.records if record.getMessage() == message]
    return [getattr(line, "gapless_fields", {}).get("request_id") for line in lines]


def assert_tells_nothing(raw: bytes) -> None:
    for words in (b"secret", b"/home", b"safetensors", b"Traceback", b"FileNotFound", b"object at", b"0x", b'File "'):
        assert words not in raw


@pytest.mark.parametrize("path", BODIES)
def test_a_fault_in_an_endpoint_tells_nothing(
    unlocked: Door, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = unlocked.context.client.tokenizer if path == "/detokenize" else ServedModelClient
    for name in ("decode",) if path == "/detokenize" else ("submit", "prepare_prompt", "prepare_chat"):
        monkeypatch.setattr(target, name, fault)
    if path == "/tokenize":
        monkeypatch.setattr(type(unlocked.context.client.tokenizer), "encode_prompt", fault, raising=False)
    with caplog.at_level(logging.ERROR, "gapless"):
        reply = unlocked.ask("POST", path, BODIES[path])
    assert reply.status == 500
    assert reply.error == {"message": MESSAGE, "type": "server_error", "param": None, "code": "internal_error"}
    assert_tells_nothing(reply.raw + repr(reply.headers).encode())
    assert SECRET in caplog.text, "the log has the reason"
    assert logged_ids(caplog, "an error that nobody expected") == [reply.headers["x-request-id"]]
    monkeypatch.undo()
    assert unlocked.ask("POST", path, BODIES[path]).status == 200
    assert unlocked.server.wait_until_idle()


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES])
def test_a_fault_in_a_stream_tells_nothing_and_ends_it(
    unlocked: Door, path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The usage is made when the text is complete.
    monkeypatch.setattr(Generation, "num_completion_tokens", property(fault))
    options = {} if path == RESPONSES else {"stream_options": {"include_usage": True}}
    with caplog.at_level(logging.ERROR, "gapless"):
        reply = unlocked.ask("POST", path, {**BODIES[path], "stream": True, **options})
    assert reply.status == 200
    assert_tells_nothing(reply.raw)
    events = list(sse_events(reply.raw))
    assert b"A" in reply.raw
    if path == RESPONSES:
        assert events[-1][0] in ("error", "response.failed")
        assert MESSAGE in events[-1][1]
    else:
        assert json.loads(events[-2][1])["error"]["message"] == MESSAGE
        assert events[-1] == (None, "[DONE]")
    assert logged_ids(caplog, "an error that nobody expected") == [reply.headers["x-request-id"]]
    assert unlocked.server.wait_until_idle()


def test_a_fault_in_the_text_of_a_request_is_logged_with_its_id(
    unlocked: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is met where the engine's news arrive, on behalf of whichever request they are for."""
    monkeypatch.setattr(ChoiceText, "add", fault)
    with caplog.at_level(logging.ERROR, "gapless"):
        replies = [unlocked.ask("POST", TEXT, BODIES[TEXT], {"X-Request-Id": name}) for name in ("one", "two")]
    assert [reply.error["code"] for reply in replies] == ["request_failed"] * 2
    assert logged_ids(caplog, "the text of a request could not be made") == ["one", "two"]
    monkeypatch.undo()
    assert unlocked.server.wait_until_idle()


# --- ids that clients choose --------------------------------------------------------------------------------------


def answer_with_id(door: Door, letter: str, request_id: str, *, stream: bool) -> tuple[str, str, str | None]:
    """The text of an answer, the id in its body, and the id in its head."""
    body = {"prompt": letter, "max_tokens": 12, "temperature": 0, "stream": stream}
    reply = door.ask("POST", TEXT, body, {"X-Request-Id": request_id})
    assert reply.status == 200, reply.raw
    contents = [json.loads(data) for _, data in list(sse_events(reply.raw))[:-1]] if stream else [reply.content]
    [own_id] = {content["id"] for content in contents}
    text = "".join(choice["text"] for content in contents for choice in content["choices"])
    return text, own_id, reply.headers.get("x-request-id")


def test_c08_live_requests_with_one_id_are_requests_of_their_own(unlocked: Door) -> None:
    letters = string.ascii_uppercase * 2
    with ThreadPoolExecutor(len(letters)) as pool:
        answers = list(
            pool.map(
                lambda number: answer_with_id(unlocked, letters[number], "same-id", stream=number % 2 == 0),
                range(len(letters)),
            )
        )
    assert [text for text, _, _ in answers] == [letter * 12 for letter in letters]
    assert Counter(header for _, _, header in answers) == {"same-id": len(letters)}
    assert len({own_id for _, own_id, _ in answers}) == len(letters), "ids of answers are ours and never the same"
    assert unlocked.server.wait_until_idle(), "every block is back"


def test_c08_an_id_may_be_used_again_at_once(unlocked: Door) -> None:
    for number in range(100):
        letter = string.ascii_uppercase[number % 26]
        text, _, header = answer_with_id(unlocked, letter, "again", stream=number % 3 == 0)
        assert (text, header) == (letter * 12, "again")
    assert unlocked.server.wait_until_idle()


def test_c08_an_id_may_be_used_again_while_the_first_request_is_being_given_up(unlocked: Door) -> None:
    body = json.dumps({"prompt": "Z", "max_tokens": ENDLESS, "temperature": 0, "stream": True})
    for letter in "ABCDEFGH":
        with closing(unlocked.connect()) as connection:
            connection.request("POST", TEXT, body, {"Content-Type": "application/json", "X-Request-Id": "left"})
            left = connection.getresponse()
            assert left.status == 200
            left.close()
        assert answer_with_id(unlocked, letter, "left", stream=False)[0] == letter * 12
    assert unlocked.server.wait_until_idle()


def test_c08_a_huge_id_is_not_given_back(unlocked: Door) -> None:
    for size, stream in ((129, True), (5_000, True), (60_000, False)):
        text, own_id, header = answer_with_id(unlocked, "H", "h" * size, stream=stream)
        assert text == "H" * 12
        assert len(own_id) < 64
        assert re.fullmatch("[0-9a-f]{32}", header or "")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: " + b"h" * (1 << 20) + b"\r\n\r\n"
    refused = unlocked.exchange(head)
    assert status_of(refused) == 431
    assert b"hhh" not in refused
    assert unlocked.server.wait_until_idle()
