"""Who may ask: every route needs the key but the probes, whatever a request looks like."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from gapless.errors import EngineDeadError
from gapless.server.keys import KeyRing
from gapless.server.limits import RequestGate
from gapless.server.metrics import ServerMetrics
from gapless.server.security import install, request_id_of, salt_of
from gapless.server.settings import ServerSettings
from unit.server.live_server import LiveServer, status_of

KEYS = ("first-key-0123", "second-key-4567")
GOOD = {"Authorization": f"Bearer {KEYS[0]}"}
PUBLIC = ("/health", "/ready")


class Client:
    """What the probes ask of an engine's client."""

    def __init__(self) -> None:
        self.alive = True

    async def counters(self) -> Any:
        raise EngineDeadError("no engine here")


class Context:
    """What the guards need of a server."""

    def __init__(self, settings: ServerSettings, **gate: Any) -> None:
        self.settings = settings
        self.client = Client()
        self.metrics = ServerMetrics()
        self.gate = RequestGate(**gate)


def make_app(context: Context) -> FastAPI:
    app = FastAPI(redirect_slashes=False)
    router = APIRouter(prefix="/v1")
    app.state.seen = []

    @router.get("/models")
    async def models(request: Request) -> Any:
        app.state.seen.append("models")
        return {"salt": salt_of(request).hex(), "request_id": request_id_of(request)}

    @router.post("/echo")
    async def echo(request: Request) -> Any:
        app.state.seen.append("echo")
        return {"length": len(await request.body())}

    @router.post("/wait")
    async def wait() -> Any:
        await asyncio.sleep(30)

    @router.post("/stream")
    async def stream() -> Any:
        return _endless()

    @router.post("/responses")
    async def responses() -> Any:
        return _endless()

    @router.post("/fail")
    async def fail() -> Any:
        raise ArithmeticError("/home/secret/path")

    app.include_router(router)
    inner = Starlette(routes=[Route("/metrics", lambda request: PlainTextResponse("mounted"))])
    app.mount("/mounted", inner)
    install(app, context)  # type: ignore[arg-type]
    return app


def _endless() -> StreamingResponse:
    async def events() -> Any:
        while True:
            yield b"data: x\n\n"
            await asyncio.sleep(0.01)

    return StreamingResponse(events(), media_type="text/event-stream")


@contextmanager
def serving(settings: ServerSettings | None = None, **gate: Any) -> Iterator[tuple[TestClient, Context]]:
    context = Context(settings or ServerSettings(api_keys=KEYS), **gate)
    app = make_app(context)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        client.app_state = app.state  # type: ignore[attr-defined]
        yield client, context


BYPASSES = [
    ("GET", "/v1/models"),
    ("HEAD", "/v1/models"),
    ("OPTIONS", "/v1/models"),
    ("POST", "/v1/models"),
    ("GET", "//v1/models"),
    ("GET", "/v1//models"),
    ("GET", "/v1/models/"),
    ("GET", "/V1/MODELS"),
    ("GET", "/v1%2fmodels"),
    ("GET", "/v1/%6dodels"),
    ("GET", "/%76%31/models"),
    ("GET", "/health/../v1/models"),
    ("GET", "/v1/./models"),
    ("GET", "/v1/models?path=/health"),
    ("GET", "/v1/models;/health"),
    ("GET", "/v1/models#/health"),
    ("GET", "/health/v1/models"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("POST", "/health"),
    ("OPTIONS", "/health"),
    ("DELETE", "/ready"),
    ("GET", "/HEALTH"),
    ("GET", "/health%00"),
    ("GET", "/health%2f..%2fmetrics"),
    ("GET", "/metrics"),
    ("GET", "/version"),
    ("GET", "/metrics/"),
    ("GET", "/openapi.json"),
    ("GET", "/docs"),
    ("GET", "/mounted/metrics"),
    ("GET", "/mounted/health"),
    ("GET", "/mounted"),
    ("GET", "/nowhere"),
    ("POST", "/v1/echo"),
    ("POST", "/v1/nowhere"),
    ("TRACE", "/v1/models"),
    ("GET", "/"),
]


@pytest.mark.parametrize(("method", "path"), BYPASSES)
def test_c57_nothing_but_the_probes_answers_without_a_key(method: str, path: str) -> None:
    with serving() as (client, context):
        refused = client.request(method, path)
        assert refused.status_code == 401
        if method != "HEAD":
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
        assert client.request(method, path, headers={"X-Original-URL": "/health"}).status_code == 401
        assert client.app_state.seen == []
        assert client.request(method, path, headers=GOOD).status_code != 401
        assert 'gapless_http_refusals_total{reason="key"} 2.0' in context.metrics.expose().decode()


def test_c57_every_route_of_the_app_is_guarded() -> None:
    """Walks the app's own document, so that a route which is added is tried too."""
    with serving() as (client, _):
        document = client.get("/openapi.json", headers=GOOD).json()
        assert len(document["paths"]) >= 5
        for path, operations in document["paths"].items():
            for method in operations:
                assert client.request(method, path).status_code == 401
                assert client.request(method, path, headers={"Authorization": "Bearer wrong"}).status_code == 401


def test_the_public_routes_are_these_and_need_no_key() -> None:
    with serving() as (client, _):
        assert {path: client.get(path).status_code for path in PUBLIC} == dict.fromkeys(PUBLIC, 200)
        assert client.head("/health").status_code == 200
        assert client.get("/version").status_code == 401
        assert set(client.get("/version", headers=GOOD).json()) == {"version"}


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        KEYS[0],
        f"Basic {KEYS[0]}",
        f"Bearer{KEYS[0]}",
        f"Bearer  {KEYS[0]}",
        f"Bearer {KEYS[0]} ",
        f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0][:-1]}",
        f"Bearer {KEYS[0].upper()}",
        f"Bearer {KEYS[0]},{KEYS[1]}",
        f"Bearer \t{KEYS[0]}",
        'Bearer "' + KEYS[0] + '"',
        "Bearer \xff\xfe",
        "Bearer " + "a" * 60_000,
    ],
)
def test_c57_only_a_whole_key_is_a_key(value: str) -> None:
    ring = KeyRing(KEYS)
    assert ring.salt_for([(b"authorization", value.encode("latin-1"))]) is None
    with serving() as (client, _):
        answer = client.post("/v1/echo", headers=[(b"Authorization", value.encode("latin-1"))], content=b"{")
        assert answer.status_code == 401
        assert KEYS[0] not in answer.text
        assert client.app_state.seen == []


def test_c57_keys_are_told_apart_and_exactly_one_header_counts() -> None:
    ring = KeyRing(KEYS)
    first, second = (ring.salt_for([(b"authorization", b"Bearer " + key.encode())]) for key in KEYS)
    assert first is not None
    assert second is not None
    assert first != second
    assert ring.salt_for([(b"authorization", b"bearer " + KEYS[1].encode())]) == second, "a scheme has no case"
    good = (b"authorization", f"Bearer {KEYS[0]}".encode())
    assert ring.salt_for([good, good]) is None
    assert ring.salt_for([good, (b"authorization", b"Bearer x")]) is None
    assert ring.salt_for([(b"x-api-key", KEYS[0].encode())]) is None
    assert ring.salt_for([]) is None
    assert KeyRing(()).salt_for([]) == b""
    assert KEYS[0].encode() not in repr(ring.__dict__).encode()


def test_a_keys_salt_reaches_the_endpoint_and_differs_by_key() -> None:
    with serving() as (client, _):
        salts = [client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).json()["salt"] for key in KEYS]
        assert len(set(salts)) == 2
        assert all(len(salt) == 32 for salt in salts)
    with serving(ServerSettings()) as (client, _):
        assert client.get("/v1/models").json()["salt"] == ""


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8000", 200),
        ("LocalHost:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("evil.example:localhost", 403),
        ("", 403),
    ],
)
def test_without_keys_only_loopback_names_are_answered(host: str, status: int) -> None:
    with serving(ServerSettings()) as (client, _):
        assert client.get("/v1/models", headers={"Host": host}).status_code == status
        assert client.get("/health", headers={"Host": host}).status_code == 200
    with serving(ServerSettings(allowed_hosts=("*",))) as (client, _):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_request_ids_are_taken_over_when_sane() -> None:
    with serving(ServerSettings()) as (client, _):
        answer = client.get("/v1/models", headers={"X-Request-Id": "abc-1.2:3"})
        assert answer.headers["x-request-id"] == answer.json()["request_id"] == "abc-1.2:3"
        for bad in ("", "a b", "a" * 129, 'x"', "\xff", "a;b"):
            answer = client.get("/v1/models", headers=[(b"X-Request-Id", bad.encode("latin-1"))])
            assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
        assert client.get("/nowhere").headers["x-request-id"]


def test_cors_is_off_unless_asked_for() -> None:
    asks = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with serving() as (client, _):
        assert client.options("/v1/echo", headers=asks).status_code == 401
    settings = ServerSettings(api_keys=KEYS, cors_origins=("https://app.example",))
    with serving(settings) as (client, _):
        allowed = client.options("/v1/echo", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        refused = client.post("/v1/echo", headers={"Origin": "https://app.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://app.example", "a page can read why"
        other = client.post("/v1/echo", headers={"Origin": "https://evil.example", **GOOD})
        assert "access-control-allow-origin" not in other.headers


def test_too_many_requests_and_draining_are_refused_with_a_time_to_wait() -> None:
    with serving(ServerSettings(), max_concurrent=1) as (client, context):
        context.gate._turns.add(object())  # type: ignore[arg-type]
        full = client.post("/v1/echo", content=b"x")
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert client.get("/v1/models").status_code == 200, "it makes no work"
        context.gate._turns.clear()
        assert client.post("/v1/echo", content=b"x").status_code == 200
        context.gate.phase = "draining"
        refused = client.post("/v1/echo", content=b"x")
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (
            503,
            "5",
            "close",
        )
        assert refused.json()["error"]["code"] == "draining"
        assert client.get("/ready").status_code == 503
        assert client.get("/ready").json() == {"status": "draining"}
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
        context.client.alive = False
        assert [client.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        assert "gapless_engine_up 0.0" in client.get("/metrics").text


def test_a_request_ends_at_its_deadline() -> None:
    with serving(ServerSettings(), timeout_s=0.2) as (client, context):
        late = client.post("/v1/wait")
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "request_timeout"
        assert late.headers["x-should-retry"] == "false"
        stream = client.post("/v1/stream")
        assert stream.status_code == 200
        assert stream.text.startswith("data: x\n\n")
        error, done, end = stream.text.split("\n\n")[-3:]
        assert '"code":"request_timeout"' in error
        assert (done, end) == ("data: [DONE]", "")
        named = client.post("/v1/responses").text.split("\n\n")
        assert named[-2].startswith('event: error\ndata: {"type":"error","code":"request_timeout"')
        assert context.gate.num_running == 0


def test_cutting_off_at_the_end_of_a_drain() -> None:
    async def scenario() -> list[str]:
        gate = RequestGate()
        ends = []

        async def request(name: str) -> None:
            turn = None
            try:
                async with gate.turn() as turn:
                    await asyncio.sleep(30 if name == "long" else 0.05)
                ends.append(name)
            except TimeoutError:
                assert turn is not None
                ends.append(f"{name}: {turn.ended_by}")

        tasks = [asyncio.create_task(request(name)) for name in ("short", "long")]
        await asyncio.sleep(0)
        assert gate.num_running == 2
        assert not await gate.until_idle(0.2)
        gate.end_all()
        assert await gate.until_idle(1)
        await asyncio.gather(*tasks)
        return ends

    assert asyncio.run(scenario()) == ["short", "long: shutdown"]


def test_an_unexpected_error_tells_nothing() -> None:
    with serving(ServerSettings()) as (client, context):
        answer = client.post("/v1/fail")
        assert answer.status_code == 500
        assert set(answer.json()) == {"error"}
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
        assert 'status="500"' in context.metrics.expose().decode()


RAW_TARGETS = [
    *(b"//v1/models", b"/v1/models/", b"/v1%2fmodels", b"/v1%2Fmodels", b"/%2e/v1/models", b"/health/../v1/models"),
    *(b"/health%2f..%2fv1/models", b"/v1/models?/health", b"/v1/models#/health", b"/v1/models;x=/health"),
    *(b"http://127.0.0.1/v1/models", b"http://127.0.0.1/health/../v1/models", b"http://evil/v1/models"),
    *(b"/health/", b"/health%20", b"/health%00", b"/Health", b"/./health", b"/%68ealth/x", b"/ready/x"),
]


def test_c57_raw_targets_lead_around_no_key() -> None:
    """As bytes on the wire, since a client library would tidy them up."""
    context = Context(ServerSettings(api_keys=KEYS))
    app = make_app(context)
    with LiveServer(app) as server:
        for target in RAW_TARGETS:
            for method in (b"GET", b"POST", b"HEAD", b"OPTIONS", b"PROPFIND"):
                head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % (method, target)
                assert status_of(server.exchange(head)) == 401, (method, target)
        # A target with a scheme and one with escapes name the same route, which is public or is not.
        for target in (b"/health", b"http://127.0.0.1/health", b"/%68ealth", b"/health?x=1", b"/health%0a"):
            head = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n" % target
            assert status_of(server.exchange(head)) == 200, target
    assert app.state.seen == []
