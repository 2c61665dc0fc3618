"""Small checkpoints behind ``LLM`` and ``AsyncLLM``, on the CPU, for the tests in this folder."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from fixtures.checkpoints import f_hist_model, f_table_model, save
from fixtures.tokenizers import BYTE_EOS, save_byte_tokenizer
from gapless import SamplingParams

VOCAB = 320
NEVER = -30.0
GREEDY = SamplingParams(temperature=0, max_tokens=64)
CPU: dict[str, Any] = {"device": "cpu", "num_blocks": 256}

# After `L`: log-probabilities -0.407606, -1.407606, -2.407606 for x, y and z.
ROW_L = {"x": 2.0, "y": 1.0, "z": 0.0}


def chain(*tokens: int | str) -> dict[int, dict[int, float]]:
    """Rows that lead from each token to the next one."""
    ids = [ord(token) if isinstance(token, str) else token for token in tokens]
    return {before: {after: 5.0} for before, after in pairwise(ids)}


def rows(**logits: Mapping[str, float]) -> dict[int, dict[int, float]]:
    """Rows by the characters of tokens: ``rows(L={"x": 2.0})``."""
    return {ord(token): {ord(after): value for after, value in row.items()} for token, row in logits.items()}


def table_checkpoint(
    folder: Path,
    *parts: Mapping[int, Mapping[int, float]],
    vocab_size: int = VOCAB,
    tokenizer: bool = True,
    chat_template: str | None = None,
    add_bos: bool = False,
    **options: Any,
) -> Path:
    """Save F-TABLE with the given rows, all other logits -30, and F-BYTE beside it.

    Args:
        folder: where to.
        parts: logits by token and next token; later ones win.
        vocab_size: a multiple of 8.
        tokenizer: save F-BYTE too.
        chat_template: of F-BYTE.
        add_bos: F-BYTE puts BOS before a text.
        options: of :func:`fixtures.checkpoints.f_table_model`; EOS is F-BYTE's where they do not say otherwise.
    """
    table = torch.full((vocab_size, vocab_size), NEVER)
    for part in parts:
        for token, row in part.items():
            table[token] = NEVER
            for after, logit in row.items():
                table[token, after] = logit
    save(f_table_model(table, **{"eos_token_id": BYTE_EOS, **options}), folder)
    if tokenizer:
        save_byte_tokenizer(folder, add_bos=add_bos, chat_template=chat_template)
    return folder


def hist_checkpoint(folder: Path, **options: Any) -> tuple[Path, PreTrainedModel]:
    """Save F-HIST with F-BYTE beside it; return the folder and the model, which is the reference."""
    model = f_hist_model(**options)
    save(model, folder)
    save_byte_tokenizer(folder)
    return folder, model


def reference_ids(model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What transformers answers, greedy, each prompt by itself."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def random_prompts(lengths: Sequence[int], *, vocab_size: int = 128, seed: int = 0) -> list[list[int]]:
    """Prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
