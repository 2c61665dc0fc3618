"""Greedy ids of SmolLM2 are those of ``transformers``' ``generate``, prompt by prompt, at every depth.

Both load the same weights, out of the same file, and compute in fp32 on the CPU. Sums of the same numbers in another
order differ, here by far less than ``ROUNDING`` in a logit. So wherever the two best tokens of the reference are
further apart than that, the ids have to be equal; the places where they are closer are counted, and there are none.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from fixtures.tokenizers import smollm2_gguf
from gapless import LLM, SamplingParams

PROMPTS_FILE = Path(__file__).parent / "prompts64.jsonl"
PROMPTS = [json.loads(line)["prompt"] for line in PROMPTS_FILE.read_text(encoding="utf-8").splitlines()]
MAX_TOKENS = 24
ROUNDING = 1e-3
REFERENCE_BATCH = 8
AMPLE, TIGHT = 400, 40  # KV blocks of 16 tokens: the longest request takes 14


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A continuation, and how far the best token led the second at each place, in logits."""

    ids: list[int]
    leads: list[float]


@pytest.mark.timeout(1500)
def test_ids_equal_those_of_transformers() -> None:
    # One test for all settings: the reference takes longer than they do, and is computed once.
    references = _references()
    places = [lead for reference in references for lead in reference.leads]
    close = sum(lead < ROUNDING for lead in places)
    print(f"{close} of {len(places)} places have a lead below {ROUNDING}; the smallest is {min(places):.2e}")
    assert len(references) == 64
    assert close == 0, "a difference could be rounding there"
    for depth, num_blocks in ((1, AMPLE), (2, AMPLE), (3, AMPLE), (2, TIGHT)):
        with LLM("smollm2", device="cpu", dtype="float32", depth=depth, num_blocks=num_blocks) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
            preemptions = llm.counters().preemptions
        different = {
            prompt: (output.outputs[0].token_ids, reference.ids)
            for prompt, output, reference in zip(PROMPTS, outputs, references, strict=True)
            if output.outputs[0].token_ids != reference.ids
        }
        assert different == {}, f"at depth {depth} with {num_blocks} blocks"
        assert (preemptions > 0) == (num_blocks == TIGHT)


def _references() -> list[Reference]:
    """What transformers answers to each prompt."""
    file = smollm2_gguf()
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found = {}
    for start in range(0, len(order), REFERENCE_BATCH):
        batch = order[start : start + REFERENCE_BATCH]
        found.update(zip(batch, _generate(model, [prompts[index] for index in batch]), strict=True))
    return [found[index] for index in range(len(prompts))]


def _generate(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> list[Reference]:
    """Run prompts of similar length together, padded on the left."""
    length = max(map(len, prompts))
    padded = torch.tensor([[2] * (length - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    answer = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    ids = answer.sequences[:, length:].tolist()
    best = torch.stack(answer.logits).topk(2).values  # [step, prompt, 2]
    leads = (best[..., 0] - best[..., 1]).T.tolist()
    ends = [row.index(2) + 1 if 2 in row else len(row) for row in ids]
    return [Reference(ids=i[:end], leads=lead[:end]) for i, lead, end in zip(ids, leads, ends, strict=True)]
