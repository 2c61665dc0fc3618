"""What the sampling and text cases promise still holds when the request loses its place, at every depth.

Each case runs behind three endless talkers in a cache that cannot hold all of them. Its prompt is read a token a step,
so it is preempted (asserted) while it is being read, and starts again once a talker has ended.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from fixtures.served_models import GREEDY, ROW_L, chain, rows, table_checkpoint
from fixtures.tokenizers import BYTE_EOS, BYTE_IM_END
from gapless import LLM, RequestOutput, SamplingParams

ONE = replace(GREEDY, max_tokens=1)
TALKERS = 3
NUMBERS = count()
EMOJI = "\U0001f600"
X, Y, Z = map(ord, "xyz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_checkpoint(
        tmp_path_factory.mktemp("table"),
        chain(*"abcde", BYTE_EOS),
        chain("G", *EMOJI.encode(), "!", BYTE_EOS),
        chain("T", *"hi", BYTE_IM_END, "m", "m"),
        rows(S={"S": 5.0}, L=ROW_L, M={"x": 2.0, "y": 1.5, "z": -1.0}, A={"A": 5.0, "B": 4.2}),
        rows(F={chr(token): 1.0 for token in range(0x20, 0x7F) if chr(token) not in "SLMATG"}),
        {ord("B"): {BYTE_EOS: 5.0}, ord("E"): {BYTE_EOS: 9.0, ord("E"): 5.0}},
    )


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda depth: f"depth{depth}")
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"num_blocks": 60, "block_size": 1, "chunk_size": 1, "depth": request.param}
    with LLM(folder, device="cpu", **options) as made:
        yield made


def preempted(llm: LLM, prompt: str, params: SamplingParams) -> RequestOutput:
    """The answer to a prompt whose request was preempted at least once."""
    talker = SamplingParams(temperature=0, max_tokens=44, ignore_eos=True)
    filled = f"{next(NUMBERS):024d}"[::-1] + prompt  # starts like none before, so nothing of it is cached
    *talkers, output = llm.generate(["S"] * TALKERS + [filled], [talker] * TALKERS + [params])
    assert [each.outputs[0].text for each in talkers] == ["S" * 44] * TALKERS
    assert output.metrics is not None
    assert output.metrics.num_preemptions > 0
    assert llm.counters().used_blocks == 0
    return output


def text(llm: LLM, prompt: str, params: SamplingParams) -> str:
    return preempted(llm, prompt, params).outputs[0].text


def test_c01_c24_penalties_see_what_they_should(llm: LLM) -> None:
    assert text(llm, "A", replace(GREEDY, frequency_penalty=0.5)) == "AAB"
    assert text(llm, "A", replace(GREEDY, presence_penalty=1.0)) == "AB"
    assert text(llm, "xM", replace(ONE, repetition_penalty=2.0)) == "y"
    assert text(llm, "xM", replace(ONE, presence_penalty=2.0)) == "x"


def test_c18_c20_c25_one_token(llm: LLM) -> None:
    assert text(llm, "L", SamplingParams(temperature=1e-6, max_tokens=1)) == "x"
    assert text(llm, "L", SamplingParams(temperature=2.0, top_k=1, max_tokens=1)) == "x"
    assert text(llm, "L", SamplingParams(temperature=2.0, top_p=1e-4, max_tokens=1)) == "x"
    assert text(llm, "L", replace(ONE, logit_bias={X: -100})) == "y"
    assert text(llm, "L", replace(ONE, allowed_token_ids=[Z])) == "z"


def test_c22_c23_seeds(llm: LLM) -> None:
    params = SamplingParams(seed=42, max_tokens=24, n=2, stop_token_ids=[ord("F")])
    [alone] = llm.generate("0" * 24 + "F", params)
    output = preempted(llm, "F", params)
    assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in alone.outputs]
    assert output.outputs[0].token_ids != output.outputs[1].token_ids


def test_c26_log_probs_are_those_of_the_raw_logits(llm: LLM) -> None:
    output = preempted(llm, "L", SamplingParams(temperature=2.0, seed=1, max_tokens=1, logprobs=3))
    assert output.outputs[0].logprobs is not None
    [place] = output.outputs[0].logprobs
    for token, value in ((X, -0.407606), (Y, -1.407606), (Z, -2.407606)):
        assert place[token].logprob == pytest.approx(value, abs=1e-4)


def test_c12_c28_prompt_log_probs(llm: LLM) -> None:
    for _ in range(2):
        output = preempted(llm, "Lx", SamplingParams(max_tokens=0, prompt_logprobs=1))
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 26
        assert output.prompt_logprobs[0] is None
        last = output.prompt_logprobs[-1]
        assert last is not None
        assert last[X].logprob == pytest.approx(-0.407606, abs=1e-4)
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"


def test_c29_c31_c34_c37_text_and_ends(llm: LLM) -> None:
    stopped = preempted(llm, "a", replace(GREEDY, stop="cd")).outputs[0]
    assert (stopped.text, stopped.token_ids, stopped.stop_reason) == ("b", [*b"bcd"], "cd")
    assert text(llm, "G", GREEDY) == EMOJI + "!"
    assert text(llm, "T", replace(GREEDY, stop="<|im_end|>", max_tokens=8)) == "hi"
    held = preempted(llm, "E", replace(GREEDY, min_tokens=3)).outputs[0]
    assert (held.token_ids, held.finish_reason) == ([*b"EEE", BYTE_EOS], "stop")
