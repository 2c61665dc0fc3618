"""Chats that cannot be rendered are refused with the reason, and the model goes on serving."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fixtures.served_models import CPU, GREEDY, chain, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, CHATML, LLAMA2_CHAT
from gapless import LLM, AsyncLLM
from gapless.errors import RequestError

USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}\n{% endfor %}"
)


def refused(make: Callable[[], Any]) -> str:
    with pytest.raises(RequestError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, [USER], "no chat template"),
        (LLAMA2_CHAT, [SYSTEM, USER], "System role not supported"),
        (ALTERNATING, [USER, USER], "Roles must alternate user/assistant"),
        ("{% for m in messages %}{{ m.content }", [USER], "template"),
        (CHATML, [], "messages is empty"),
        (CHATML, [{"role": "oracle", "content": "hi"}], "role"),
    ],
)
def test_c36_a_refused_chat_says_why(tmp_path: Path, template: str | None, messages: Any, message: str) -> None:
    folder = table_checkpoint(tmp_path, chain("a", *"bc", BYTE_EOS), chat_template=template)

    async def stream() -> str:
        async with AsyncLLM(folder, **CPU) as llm:
            with pytest.raises(RequestError, match=message):
                async for _ in llm.chat(messages, GREEDY):
                    pass
            outputs = [output async for output in llm.generate("a", GREEDY)]
        return outputs[-1].outputs[0].text

    with LLM(folder, **CPU) as llm:
        assert message in refused(lambda: llm.chat(messages, GREEDY))
        assert llm.generate("a", GREEDY)[0].outputs[0].text == "bc"
        assert llm.counters().used_blocks == 0
    assert asyncio.run(asyncio.wait_for(stream(), 30)) == "bc"


def test_c36_a_template_given_at_load_serves_a_model_without_one(tmp_path: Path) -> None:
    folder = table_checkpoint(tmp_path, chain("\n", *"ok", BYTE_EOS))
    with LLM(folder, **CPU, chat_template=CHATML) as llm:
        assert llm.chat([SYSTEM, USER], GREEDY)[0].outputs[0].text == "ok"
