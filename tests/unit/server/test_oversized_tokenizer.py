"""A tokenizer with more ids than the model has embeddings: what cannot be looked up is refused, and hurts nobody."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fixtures.api_server import ApiServer
from fixtures.served_models import chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_BOS, BYTE_IM_END, BYTE_IM_START, CHATML

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ROWS = 256
USER = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The 256 bytes have rows, F-BYTE's four control tokens, which ChatML uses, have none."""
    folder = table_checkpoint(
        tmp_path_factory.mktemp("narrow"),
        rows(L={"x": 5.0}),
        chain("Q", "Q"),
        vocab_size=ROWS,
        chat_template=CHATML,
        eos_token_id=None,
    )
    with ApiServer(folder, {"max_model_len": 256}) as api:
        yield api


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": [BYTE_IM_START]}, "prompt"),
        (TEXT, {"prompt": [76, ROWS, 76]}, "prompt"),
        (TEXT, {"prompt": [[76], [76, BYTE_BOS]]}, "prompt[1]"),
        (TEXT, {"prompt": [1 << 40]}, "prompt"),
        (TEXT, {"prompt": "L<|im_end|>"}, "prompt"),
        (TEXT, {"prompt": ["L", "L", "</s>"]}, "prompt[2]"),
        (CHAT, {"messages": USER}, "messages"),
        (RESPONSES, {"input": "x"}, "input"),
        (TEXT, {"prompt": "L", "stop_token_ids": [BYTE_IM_END]}, "stop_token_ids"),
        (TEXT, {"prompt": "L", "allowed_token_ids": [76, BYTE_IM_END]}, "allowed_token_ids"),
        (TEXT, {"prompt": "L", "logit_bias": {str(BYTE_IM_END): 1}}, "logit_bias"),
        (TEXT, {"prompt": "L", "bad_words": ["<|im_end|>"]}, "bad_words"),
        ("/detokenize", {"tokens": [BYTE_IM_START]}, "tokens"),
        ("/tokenize", {"prompt": "<|im_start|>"}, "prompt"),
    ],
)
def test_c39_an_id_without_an_embedding_is_refused(
    narrow: ApiServer, path: str, fields: dict[str, Any], param: str
) -> None:
    steps = narrow.counters().steps
    for stream in (False, True) if path.startswith("/v1") else (None,):
        reply = narrow.post(path, **fields, **({} if stream is None else {"stream": stream}))
        assert reply.status == 400, reply.raw
        assert str(reply.error["param"]).startswith(param)
    assert narrow.counters().steps == steps, "nothing of it is run"
    narrow.assert_serves()


def test_c39_neighbours_of_refused_ids_go_on(narrow: ApiServer) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(narrow.text, "Q", max_tokens=200) for _ in range(4)]
        for _ in range(10):
            assert narrow.post(TEXT, prompt=["Q", [BYTE_IM_START]], max_tokens=200).status == 400
        assert [answer.result() for answer in running] == ["Q" * 200] * 4
    assert narrow.wait_until_idle()


def test_c39_every_row_may_be_asked_for(narrow: ApiServer) -> None:
    content = narrow.complete([[token] for token in range(ROWS)], max_tokens=1)
    assert len(content["choices"]) == ROWS
