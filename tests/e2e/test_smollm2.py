"""The Python API on a real model: SmolLM2-135M-Instruct, on the CPU."""

import asyncio
from collections.abc import Iterator

import pytest

from fixtures.tokenizers import smollm2_gguf
from gapless import LLM, AsyncLLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    smollm2_gguf()
    with LLM("smollm2", device="cpu", num_blocks=200) as made:
        yield made


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    [output] = llm.chat(QUESTION, GREEDY)
    assert output.outputs[0].text == ANSWER
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] in llm.eos_token_ids


def test_a_batch_of_chats_and_continuations(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": f"What is the capital of {name}?"}] for name in ("Japan", "France")]
    japan, france = (output.outputs[0].text for output in llm.chat(conversations, GREEDY))
    assert "Tokyo" in japan
    assert france == ANSWER
    [continued] = llm.generate(["The capital of France is"], GREEDY)
    assert continued.outputs[0].text.startswith(" Paris")


def test_async_llm_streams_the_same_text(llm: LLM) -> None:
    prompts = ["Name three fruits.", "Schreibe einen Satz über den Schnee 🙂.", "日本について一文で書いてください。"]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    wanted = llm.chat(conversations, GREEDY)

    async def everything() -> None:
        async with AsyncLLM("smollm2", device="cpu", num_blocks=200) as served:

            async def ask(index: int) -> None:
                text = ""
                async for output in served.chat(conversations[index], GREEDY):
                    assert output.outputs[0].text.startswith(text)
                    text = output.outputs[0].text
                assert text == wanted[index].outputs[0].text
                assert output.outputs[0].token_ids == wanted[index].outputs[0].token_ids

            await asyncio.gather(*map(ask, range(len(prompts))))

    asyncio.run(everything())
