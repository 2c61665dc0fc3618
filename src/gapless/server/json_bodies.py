"""Request bodies, read strictly: :class:`StrictJsonRoute` is the route of every endpoint that takes JSON.

JSON leaves room that has bitten servers: ``NaN``, a key twice, nesting without end, half of a surrogate pair, integers
of a million digits, millions of empty lists, other encodings. All of it is refused here with a 400 that says where,
before a model of the request is made. A large body is read in a thread: the event loop has streams to write meanwhile.
The parser holds the interpreter's lock from the first value to the last, though, so how many there may be is bounded:
8 MiB of ``[],[],[]`` would hold up every stream for most of a second. Of integers there may be a million, so in a large
body they are made by a function of ours: Python gives the lock away between two calls, and to nobody within the parser.
There is one such thread: of several, each would take the lock before the event loop has it again.

The functions are pure; routes belong to the event loop.
"""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from gapless.errors import shown
from gapless.server.error_bodies import ApiError

__all__ = [
    "MAX_CONTAINERS",
    "MAX_FIELDS",
    "MAX_FRACTIONS",
    "MAX_KEYS",
    "MAX_NESTING",
    "MAX_STRINGS",
    "MAX_VALUES",
    "StrictJsonRoute",
    "read_json",
]

MAX_NESTING: Final = 64
MAX_FIELDS: Final = 256
MAX_KEYS: Final = 4096
# Token ids of a request's prompts are values; its messages, and their parts, are containers.
MAX_VALUES: Final = 1 << 20
MAX_STRINGS: Final = 1 << 17
MAX_CONTAINERS: Final = 1 << 16
# They take ten times as long as integers, and no request needs more than a few: counted by their dots and exponents.
MAX_FRACTIONS: Final = 1 << 17
_LARGE_BODY_BYTES = 64 * 1024
# Above, nobody is kept waiting by the parser: with a call for each integer it takes three times as long, but gives way.
_LOCKING_BODY_BYTES = 256 * 1024
_JSON_TYPE: Final = re.compile(r"application/(?:[\w.-]+\+)?json\s*(?:;.*)?", re.IGNORECASE)
_CONTAINERS: Final = (dict, list)
_SURROGATE_ESCAPE: Final = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_reader: Final = ThreadPoolExecutor(1, thread_name_prefix="gapless-json")


class StrictJsonRoute(APIRoute):
    """Reads the body with :func:`read_json`; what FastAPI then sees is the result."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler with a body that has been read already."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def read_and_handle(request: Request) -> Response:
            _check_content_type(request)
            body = await request.body()
            value = await _read_large(body) if len(body) > _LARGE_BODY_BYTES else read_json(body)
            # Where starlette keeps what Request.json() has parsed once.
            request._json = value
            return await handle(request)

        return read_and_handle


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds.

    Raises:
        ApiError: 400, with the reason and, where there is one, the place.
    """
    if not body:
        raise _bad("the body is empty; send a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not UTF-8: byte {error.start} cannot be decoded") from None
    most_containers = _check_counts(body)
    parse_int = _integer if len(body) > _LOCKING_BODY_BYTES else None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=parse_int)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise _bad(f"the body is not valid JSON: {error.msg.lower()} at {place}") from None
    except RecursionError:
        raise _bad(f"the body is nested more than {MAX_NESTING} deep; flatten it") from None
    except ValueError:  # Python's limit on the digits of an integer
        raise _bad("the body has an integer of hundreds of digits or more") from None
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, not {_NAMES.get(type(value), 'a number')}")
    if len(value) > MAX_FIELDS:  # each that is unknown would cost as much as a whole request
        raise _bad(f"the body has {len(value)} fields; no request has more than {MAX_FIELDS}")
    if most_containers > MAX_NESTING:  # with fewer nothing can be too deep, and a million ids need not be looked at
        _check_nesting(value)
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value, "")
    return value


async def _read_large(body: bytes) -> dict[str, Any]:
    return await asyncio.get_running_loop().run_in_executor(_reader, read_json, body)


_NAMES: Final[dict[type, str]] = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}


def _check_content_type(request: Request) -> None:
    given = request.headers.get("content-type")
    if given is None or not _JSON_TYPE.fullmatch(given.strip()):
        what = "is missing" if given is None else f"is {shown(given)}"
        raise _bad(f"the content type {what}; send application/json")


def _check_counts(body: bytes) -> int:
    """Refuse more values than a request can need, before any of them is made; return the most arrays and objects."""
    containers = _containers(body)
    if (
        body.count(b'"') // 2 > MAX_STRINGS
        or body.count(b",") > MAX_VALUES
        or containers > MAX_CONTAINERS
        or _fractions(body) > MAX_FRACTIONS
    ):
        # Perhaps. Only now is it worth telling what is JSON from what is text in its strings.
        bare = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
        _check_count(bare.count(b'"') // 2, MAX_STRINGS, "strings")
        bare = b"".join(bare.split(b'"')[::2])
        containers = _containers(bare)
        _check_count(bare.count(b","), MAX_VALUES, "values")
        _check_count(containers, MAX_CONTAINERS, "arrays and objects")
        _check_count(_fractions(bare), MAX_FRACTIONS, "fractions, exponents and truth values")
    return containers


def _containers(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")


def _fractions(body: bytes) -> int:
    return body.count(b".") + body.count(b"e") + body.count(b"E")


def _check_count(count: int, limit: int, what: str) -> None:
    if count > limit:
        raise _bad(f"the body holds {count} {what}; no request may have more than {limit}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _bad(f"the body has an object with {len(pairs)} keys; the limit is {MAX_KEYS}")
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ApiError(400, f"the key {shown(key)} is there twice; give it once", param=_param(key))
            seen.add(key)
    return value


def _integer(digits: str) -> int:
    """What ``int`` does. ``int`` itself would not do: the parser knows it and keeps the lock."""
    return int(digits)


def _refuse_constant(name: str) -> Any:
    raise _bad(f"the body is not valid JSON: it holds {name}")


def _check_nesting(value: dict[str, Any]) -> None:
    """Level by level, since what is too deep to be walked by recursion is what is looked for."""
    level: list[Any] = [value]
    for _ in range(MAX_NESTING):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, _CONTAINERS)
        ]
        if not level:
            return
    raise _bad(f"the body is nested more than {MAX_NESTING} deep; flatten it")


def _check_surrogates(value: Any, path: str) -> None:
    if isinstance(value, str):
        lone = _SURROGATE.search(value)
        if lone is not None:
            raise ApiError(
                400,
                f"{path or 'the body'} holds a lone surrogate U+{ord(lone[0]):04X} at character {lone.start()}, which "
                "is not valid text; send the whole character",
                param=path or None,
                code="invalid_value",
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_surrogates(key, path)
            _check_surrogates(item, f"{path}.{_param(key)}" if path else _param(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_surrogates(item, f"{path}[{index}]")


def _param(key: str) -> str:
    return shown(key)[1:-1]


def _bad(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_body")
