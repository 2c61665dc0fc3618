"""``do_sample`` false in the model's file, over HTTP: greedy, unless a request chooses a temperature."""

import json
import logging
from typing import Any

import pytest

from fixtures.api_server import ApiServer
from fixtures.served_models import ROW_L, chain, rows, table_checkpoint

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def first_tokens(server: ApiServer, **fields: Any) -> set[str]:
    """What 60 draws give after ``L``."""
    content = server.ok(TEXT, prompt="L", n=60, max_tokens=1, seed=1, **fields)
    return {choice["text"] for choice in content["choices"]}


def test_c59_do_sample_false_is_greedy_by_default_and_said_once(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    model = (rows(L=ROW_L), *(chain(letter, "L") for letter in "xyz"))
    folder = table_checkpoint(tmp_path_factory.mktemp("model"), *model, chat_template=TEMPLATE)
    file = folder / "generation_config.json"
    named = {"do_sample": False, "temperature": 2.0, "max_new_tokens": 3}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    with caplog.at_level(logging.INFO, "gapless"), ApiServer(folder) as server:
        assert first_tokens(server) == {"x"}
        assert first_tokens(server, temperature=None) == {"x"}, "null is as good as nothing"
        assert first_tokens(server, temperature=0) == {"x"}
        assert first_tokens(server, temperature=1) == {"x", "y", "z"}, "an explicit value counts, built in or not"
        for _ in range(20):
            chat = server.ok(CHAT, messages=[{"role": "user", "content": "L"}])
            assert chat["choices"][0]["message"]["content"] == "xLx"
            assert server.ok(RESPONSES, input="L")["output"][0]["content"][0]["text"] == "xLx"
        assert server.ok(TEXT, prompt="L")["usage"]["completion_tokens"] == 3
        assert server.ok(TEXT, prompt="L", max_tokens=16)["usage"]["completion_tokens"] == 16
    [line] = [record.getMessage() for record in caplog.records if "generation_config.json" in record.getMessage()]
    assert "temperature=0.0, max_tokens=3 " in line
    assert "generation_config='none'" in line, "and how to do without"
