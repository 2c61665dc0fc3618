"""Servers that tests share, started when the first test asks for one."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fixtures.api_server import EMOJI, MAX_MODEL_LEN, NAN_TOKEN, ApiServer
from fixtures.checkpoints import f_table_model, save
from fixtures.served_models import ROW_L, chain, hist_checkpoint, rows, table_checkpoint
from fixtures.tokenizers import BYTE_BOS, BYTE_EOS, BYTE_IM_END, CHATML, LLAMA2_CHAT, save_byte_tokenizer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """F-TABLE of 320 tokens with F-BYTE's 260 and ChatML; no BOS, no defaults of the model's.

    ``L``: ROW-L, each followed by EOS. ``h``: ``hi<|im_end|>more``; a chat's prompt ends with a newline, which leads
    to ``h``. ``E``: an emoji in four tokens. ``Q``: for ever. ``P``: ``p``, id 300 without a token, ``q``. ``N``: all
    but ``n`` impossible. ``!``: not a number.
    """
    folder = tmp_path_factory.mktemp("table")
    parts = [
        rows(L=ROW_L),
        *(chain(letter, BYTE_EOS) for letter in "xyz"),
        chain("\n", "h", "i", BYTE_IM_END, "m", "o", "r", "e", BYTE_EOS),
        chain("E", *EMOJI, BYTE_EOS),
        chain("Q", "Q"),
        chain("P", "p", 300, "q", BYTE_EOS),
    ]
    table = torch.full((320, 320), -30.0)
    for part in parts:
        for token, row in part.items():
            for after, logit in row.items():
                table[token, after] = logit
    table[ord("N")] = -1e30
    table[ord("N"), ord("n")] = 0.0
    table[ord("n"), BYTE_EOS] = 5.0
    save(f_table_model(table, eos_token_id=BYTE_EOS, nan_tokens=[NAN_TOKEN]), folder)
    save_byte_tokenizer(folder, chat_template=CHATML)
    with ApiServer(folder, {"max_model_len": MAX_MODEL_LEN}) as api:
        yield api


@pytest.fixture(scope="session")
def bos_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """ROW-L with a tokenizer that adds BOS, a template that has BOS itself and refuses system messages, and ``top_k=1``
    and ``max_new_tokens=3`` in its ``generation_config.json``. BOS leads to ``x``."""
    folder = table_checkpoint(
        tmp_path_factory.mktemp("bos"),
        rows(L=ROW_L),
        chain(BYTE_BOS, "x", "y", "z", "x"),
        chain("]", "x"),
        add_bos=True,
        chat_template=LLAMA2_CHAT,
    )
    _add_to_generation_config(folder, top_k=1, max_new_tokens=3, temperature=2.0, do_sample=True)
    with ApiServer(folder, {"max_model_len": 64}) as api:
        yield api


@pytest.fixture(scope="session")
def hist_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """F-HIST, prefilled in small chunks, no chat template; ``top_k=1`` in the file and ``-1`` by the operator."""
    folder, _ = hist_checkpoint(tmp_path_factory.mktemp("hist"), vocab_size=264)
    _add_to_generation_config(folder, top_k=1)
    engine = {"chunk_size": 16, "token_budget": 32}
    with ApiServer(folder, engine, override_generation_config={"top_k": -1}) as api:
        yield api


def _add_to_generation_config(folder: Path, **values: object) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
