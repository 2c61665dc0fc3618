"""``docs/server/api.md`` names what the server takes."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from gapless.server.protocol.chat import ChatRequest, StreamOptions
from gapless.server.protocol.completions import CompletionRequest
from gapless.server.protocol.models import DetokenizeRequest, TokenizeRequest
from gapless.server.protocol.responses import ResponseRequest

TEXT = (Path(__file__).parents[3] / "docs" / "server" / "api.md").read_text("utf-8")
SECTIONS = {part.split("\n", 1)[0]: part for part in TEXT.split("\n## ")}


@pytest.mark.parametrize(
    ("model", "section"),
    [
        (ChatRequest, "Chats"),
        (CompletionRequest, "Completions"),
        (ResponseRequest, "Responses"),
        (TokenizeRequest, "Tokens"),
        (DetokenizeRequest, "Tokens"),
    ],
)
def test_every_field_is_told(model: type[BaseModel], section: str) -> None:
    told = SECTIONS[section] + SECTIONS["Options of all generating requests"] + SECTIONS["Rules for every request"]
    missing = [name for name in model.model_fields if f"`{name}`" not in told]
    assert not missing


def test_options_of_streams_are_told() -> None:
    for name in StreamOptions.model_fields:
        assert f"`{name}`" in TEXT
