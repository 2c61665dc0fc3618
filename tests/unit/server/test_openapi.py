"""The OpenAPI document tells the truth: requests made from it get answers that it describes, and never a 5xx."""

import json
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from fixtures.api_server import MODEL, ApiServer, sse_events
from unit.server.test_security import PUBLIC

load_all_checks()
CHOSEN = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)
OPERATIONS = [
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("post", "/v1/responses"),
    ("post", "/tokenize"),
    ("post", "/detokenize"),
    ("get", "/v1/models"),
    ("get", "/v1/models/{model}"),
    ("get", "/health"),
    ("get", "/ready"),
    ("get", "/version"),
    ("get", "/metrics"),
]
GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "L", "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/tokenize": {"prompt": "L"},
    "/detokenize": {"tokens": [76]},
}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# What the guards answer before an endpoint sees a request.
GUARDS = {"401", "403", "503"}
GUARDS_OF_POSTS = {"405", "408", "413", "429", "431", "504"}
# Numbers of tokens are kept small, so that the test asks many questions and not for many tokens.
COUNTS = ("n", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")


@pytest.fixture(scope="module")
def document(bos_server: ApiServer) -> Any:
    reply = bos_server.get("/openapi.json")
    assert reply.status == 200
    return reply.content


def test_every_operation_is_described(document: Any) -> None:
    described = {(method, path) for path, item in document["paths"].items() for method in item}
    assert set(OPERATIONS) == described
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert "422" not in operation["responses"], (method, path)
            answers = operation["responses"]
            expected = {"200", *(() if path in PUBLIC else GUARDS)}
            if method == "post":
                expected |= {"400", "404", "500", *GUARDS_OF_POSTS}
            assert expected <= answers.keys(), (method, path)
            assert (operation.get("security") == []) is (path in PUBLIC), (method, path)
            for status in expected - {"200"}:
                error = answers[status]["content"]["application/json"]["schema"]
                assert error == {"$ref": "#/components/schemas/ErrorBody"}
    unknown = [name for name in references(document) if name not in document["components"]["schemas"]]
    assert not unknown


def references(node: Any) -> set[str]:
    """The names of all components that a document refers to."""
    if isinstance(node, list):
        return {name for item in node for name in references(item)}
    if isinstance(node, dict):
        own = {node["$ref"].removeprefix("#/components/schemas/")} if isinstance(node.get("$ref"), str) else set()
        return own | {name for item in node.values() for name in references(item)}
    return set()


def with_plain_integers(node: Any) -> Any:
    """For JSON Schema 5.0 is an integer, for the server it is not."""
    if isinstance(node, float) and node.is_integer():
        return int(node)
    if isinstance(node, list):
        return [with_plain_integers(item) for item in node]
    return {name: with_plain_integers(item) for name, item in node.items()} if isinstance(node, dict) else node


def checked_events(document: Any, path: str, raw: bytes) -> list[str]:
    """The data of a stream's events, each of which has the form that the document tells."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    validator = jsonschema_rs.validator_for({**content["schema"], "components": document["components"]})
    events = [data for _, data in sse_events(raw) if data != "[DONE]"]
    for data in events:
        validator.validate(json.loads(data))
    return events


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((method, path, GenerationMode.POSITIVE) for method, path in OPERATIONS),
        *((method, path, GenerationMode.NEGATIVE) for method, path in OPERATIONS if method == "post"),
    ],
)
def test_answers_are_as_described(
    bos_server: ApiServer, document: Any, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=bos_server.url)
    statuses: list[int] = []
    streamed: list[str] = []

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = with_plain_integers(case.body)
            for name in COUNTS:
                if isinstance(case.body.get(name), int) and case.body[name] > 3:
                    case.body[name] = 3
            if mode == GenerationMode.POSITIVE:
                if isinstance(case.body.get("model"), str):
                    case.body["model"] = MODEL  # any other is a 404, and nothing else of the request is tried
                if path in STREAMS:
                    case.body["stream"] = len(case.body) % 2 == 0  # by chance they are too rare
        check(case)

    def check(case: Any) -> None:
        response = case.call()
        statuses.append(response.status_code)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            # The document tells the form of an event's data; schemathesis takes it for that of the event itself.
            case.validate_response(response, checks=CHOSEN[:-1])
            streamed.extend(checked_events(document, path, response.content))
        else:
            case.validate_response(response, checks=CHOSEN)

    ask()
    if mode == GenerationMode.NEGATIVE:
        assert 400 in statuses
    else:
        # By chance no drawn request may have been one that can be served.
        bodies = [GOOD_BODIES[path]] if path in GOOD_BODIES else []
        if path in STREAMS:
            bodies.append({**GOOD_BODIES[path], "stream": True})
        for body in bodies:
            check(schema[path][method].Case(body=body, media_type="application/json"))
        assert ("{" in path and 404 in statuses) or 200 in statuses
        assert streamed or path not in STREAMS
    bos_server.assert_serves()
