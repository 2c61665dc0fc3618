"""``LLM`` against ``transformers``, id by id: whatever runs beside a request, and however it is cut up.

The model's output depends on its whole history, and its two best tokens are never closer than 0.005, far above what
fp32 sums differ by when a matrix has another number of rows.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from fixtures.served_models import hist_checkpoint, random_prompts, reference_ids
from gapless import LLM, RequestOutput, SamplingParams

TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS)
# One token, around every block and chunk size of the grid, and several chunks.
LENGTHS = (1, 3, 4, 5, 9, 15, 16, 17, 48)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    folder: Path
    model: PreTrainedModel
    prompts: list[list[int]]
    ids: list[list[int]]


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """20 prompts of 1 to 24 tokens and their continuations."""
    folder, model = hist_checkpoint(tmp_path_factory.mktemp("hist"))
    prompts = random_prompts([1 + (7 * i) % 24 for i in range(20)], seed=1)
    return Reference(folder=folder, model=model, prompts=prompts, ids=reference_ids(model, prompts, TOKENS))


@pytest.fixture(scope="module")
def lengths(twenty: Reference) -> Reference:
    """Prompts of the lengths that matter to blocks and chunks."""
    prompts = random_prompts(LENGTHS, seed=2)
    return Reference(
        folder=twenty.folder, model=twenty.model, prompts=prompts, ids=reference_ids(twenty.model, prompts, TOKENS)
    )


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_the_reference_decides_clearly(twenty: Reference) -> None:
    smallest = float("inf")
    for prompt, ids in zip(twenty.prompts, twenty.ids, strict=True):
        with torch.inference_mode():
            logits = twenty.model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        smallest = min(smallest, float((best[:, 0] - best[:, 1]).min()))
    assert smallest > 1e-3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_c16_neighbours_and_arrival_do_not_matter(twenty: Reference, depth: int) -> None:
    with LLM(twenty.folder, device="cpu", num_blocks=256, block_size=4, depth=depth) as llm:
        assert ids_of(llm.generate(twenty.prompts, PARAMS)) == twenty.ids, "together"
        assert ids_of(llm.generate(twenty.prompts[::-1], PARAMS)) == twenty.ids[::-1], "reversed"
        for prompt, ids in zip(twenty.prompts, twenty.ids, strict=True):
            assert ids_of(llm.generate([prompt], PARAMS)) == [ids], "alone"

        arrived: dict[int, list[int]] = {}

        def arrive(index: int, delay_s: float) -> None:
            time.sleep(delay_s)
            arrived[index] = ids_of(llm.generate([twenty.prompts[index]], PARAMS))[0]

        random.seed(depth)
        threads = [threading.Thread(target=arrive, args=(i, 0.05 * random.random())) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [arrived[index] for index in range(20)] == twenty.ids, "random arrivals"


@pytest.mark.parametrize("cache", ["tight", "ample"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("token_budget", [8, 64])
@pytest.mark.parametrize("chunk_size", [1, 3, 16, None])
def test_c10_chunks_budget_blocks_and_preemption_do_not_matter(
    lengths: Reference, chunk_size: int | None, token_budget: int, block_size: int, cache: str
) -> None:
    longest = max(LENGTHS) + TOKENS
    num_blocks = -(-(longest if cache == "tight" else 10 * longest) // block_size)
    with LLM(
        lengths.folder,
        device="cpu",
        num_blocks=num_blocks,
        block_size=block_size,
        token_budget=token_budget,
        chunk_size=chunk_size,
    ) as llm:
        outputs = llm.generate(lengths.prompts, PARAMS)
        preemptions = llm.counters().preemptions
        used = llm.counters().used_blocks
    assert ids_of(outputs) == lengths.ids
    assert used == 0
    if cache == "tight":
        assert preemptions > 0
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) == preemptions
    else:
        assert preemptions == 0


def test_c10_seeded_requests_survive_preemption(lengths: Reference) -> None:
    params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=TOKENS) for seed in range(len(LENGTHS))]
    answers = []
    for num_blocks in (400, 20):
        with LLM(lengths.folder, device="cpu", num_blocks=num_blocks, block_size=4, token_budget=8) as llm:
            answers.append(ids_of(llm.generate(lengths.prompts, params)))
            assert (llm.counters().preemptions > 0) == (num_blocks == 20)
    assert answers[0] == answers[1]


def test_c11_a_cached_prompt_gives_the_same_answer(lengths: Reference) -> None:
    with LLM(lengths.folder, device="cpu", num_blocks=256, block_size=4) as llm:
        for prompt, ids in zip(lengths.prompts, lengths.ids, strict=True):
            [cold] = llm.generate([prompt], PARAMS)
            [warm] = llm.generate([prompt], PARAMS)
            assert ids_of([cold, warm]) == [ids, ids]
            assert cold.num_cached_tokens == 0
            assert warm.num_cached_tokens == (len(prompt) - 1) // 4 * 4, "the last token is always computed"


def test_c11_shared_prefixes_in_any_order(twenty: Reference) -> None:
    stems = random_prompts([8, 13, 21], seed=3)
    tails = random_prompts([1 + i % 7 for i in range(30)], seed=4)
    prompts = [stems[i % 3] + tail for i, tail in enumerate(tails)]
    random.Random(0).shuffle(prompts)
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(twenty.folder, device="cpu", num_blocks=256, block_size=4, enable_prefix_caching=False) as cold:
        wanted = cold.generate(prompts, params)
    assert all(output.num_cached_tokens == 0 for output in wanted)
    assert ids_of(wanted) == reference_ids(twenty.model, prompts, 8)
    with LLM(twenty.folder, device="cpu", num_blocks=48, block_size=4) as warm:
        together = warm.generate(prompts, params)
        alone = [warm.generate([prompt], params)[0] for prompt in prompts]
    assert ids_of(together) == ids_of(alone) == ids_of(wanted)
    assert sum(output.num_cached_tokens for output in alone) > 30 * 8 / 2


def test_c11_a_salt_keeps_caches_apart(twenty: Reference) -> None:
    prompt = random_prompts([17])[0]
    with LLM(twenty.folder, device="cpu", num_blocks=64, block_size=4) as llm:
        cached = [
            llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, PARAMS)[0].num_cached_tokens
            for salt in ("mine", "yours", "mine")
        ]
    assert cached == [0, 0, 16]


def test_c39_text_that_needs_ids_beyond_the_embedding_is_refused(twenty: Reference) -> None:
    with LLM(twenty.folder, device="cpu", num_blocks=64) as llm:
        assert llm.eos_token_ids == frozenset(), "the tokenizer's own id is not one of the model's"
        with pytest.raises(ValueError, match=r"prompts\[1\] needs token id 195, but the model has only 128 ids"):
            llm.generate(["abc", "é"], PARAMS)
        assert len(llm.generate("abc", PARAMS)[0].outputs[0].text) == TOKENS
