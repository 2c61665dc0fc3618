"""A user's logits processor: called with what the device knows, at every depth, and beside everything else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fixtures.served_models import CPU, ROW_L, hist_checkpoint, random_prompts, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS
from gapless import LLM, SamplingParams
from gapless.errors import EngineDeadError
from gapless.sampling.logits_hook import SampledRows

GREEDY = SamplingParams(temperature=0, max_tokens=8)
ROW_A = {ord("A"): {ord("A"): 5.0, ord("B"): 4.2}, ord("B"): {BYTE_EOS: 5.0}}


def no_doubles(logits: Tensor, rows: SampledRows) -> Tensor:
    return logits.scatter(1, rows.input_tokens[:, None], float("-inf"))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_it_sees_the_token_before_at_every_depth(tmp_path: Path, depth: int) -> None:
    loops = rows(S={"S": 5.0, "T": 4.0, "U": 3.0}, T={"T": 5.0, "S": 4.0})
    table_checkpoint(tmp_path, ROW_A, loops)
    with LLM(tmp_path, **CPU, depth=depth, logits_processor=no_doubles) as llm:
        outputs = llm.generate(["A", "S", "T"], GREEDY)
        assert [output.outputs[0].text for output in outputs] == ["B", "TSTSTSTS", "STSTSTST"]


@pytest.mark.parametrize(("depth", "num_blocks"), [(1, 256), (3, 256), (3, 12)])
def test_it_is_exact_across_preemption(tmp_path: Path, depth: int, num_blocks: int) -> None:
    folder, model = hist_checkpoint(tmp_path)
    prompts = random_prompts([9, 3, 14, 6, 1, 11])
    with LLM(
        folder, device="cpu", num_blocks=num_blocks, block_size=4, depth=depth, logits_processor=no_doubles
    ) as llm:
        outputs = llm.generate(prompts, replace(GREEDY, max_tokens=20))
        if num_blocks == 12:
            assert llm.counters().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference(model, prompt, 20)


def test_it_comes_before_other_options_and_after_log_probs(tmp_path: Path) -> None:
    table_checkpoint(tmp_path, rows(L=ROW_L))
    seen: list[SampledRows] = []

    def halve_x(logits: Tensor, rows: SampledRows) -> Tensor:
        seen.append(rows)
        logits[:, ord("x")] *= 0.25
        return logits

    with LLM(tmp_path, **CPU, logits_processor=halve_x) as llm:
        one = replace(GREEDY, max_tokens=1, logprobs=1)
        first, second = llm.generate(["L", "abL"], [one, replace(one, logit_bias={ord("y"): -0.6})])
        assert first.outputs[0].text == "y"
        assert second.outputs[0].text == "x"
        for output in (first, second):
            assert output.outputs[0].logprobs is not None
            assert output.outputs[0].logprobs[0][ord("x")].logprob == pytest.approx(-0.407606, abs=1e-4)
        assert seen[0].request_ids == (int(first.request_id), int(second.request_id))
        assert seen[0].input_tokens.tolist() == [ord("L")] * 2
        assert seen[0].output_positions.tolist() == [0, 0]
        assert len(set(seen[0].rows.tolist())) == 2


@pytest.mark.parametrize("wrong", [lambda logits, rows: logits[:, :5], lambda logits, rows: logits.double()])
def test_a_result_of_another_shape_ends_the_engine_and_says_why(tmp_path: Path, wrong: Any) -> None:
    table_checkpoint(tmp_path, rows(L=ROW_L))
    with LLM(tmp_path, **CPU, logits_processor=wrong) as llm, pytest.raises(EngineDeadError, match="logits processor"):
        llm.generate("L", GREEDY)


def reference(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(max_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        logits = logits.clone()
        logits[ids[-1]] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
