"""Whose defaults count: the request's, the caller's, those of ``generation_config.json``, or the built-in ones."""

import asyncio
import itertools
import json
import logging
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fixtures.served_models import CPU, ROW_L, chain, rows, table_checkpoint
from gapless import LLM, AsyncLLM, SamplingParams
from gapless.errors import CheckpointError, ConfigError
from gapless.generation_defaults import file_defaults
from gapless.sampling_params import unchosen


def checkpoint(folder: Path, **generation_config: Any) -> Path:
    table_checkpoint(folder, rows(L=ROW_L), chain("a", "b", "a"))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


def drawn(llm: LLM, params: SamplingParams | None, number: int = 200) -> set[str]:
    one = SamplingParams(max_tokens=1) if params is None else replace(params, max_tokens=1)
    # Seeded: of thousands of draws at temperature 2 one may well be one of the 300 tokens that are nearly impossible.
    seeded = [replace(one, seed=seed) for seed in range(number)]
    return {output.outputs[0].text for output in llm.generate(["L"] * number, seeded)}


def test_c59_a_file_with_top_k_1(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, top_k=1)
    hot = SamplingParams(temperature=2)
    with LLM(folder, **CPU) as llm:
        assert drawn(llm, hot) == {"x"}
        assert drawn(llm, replace(hot, top_k=-1)) == {"x", "y", "z"}
        assert drawn(llm, replace(hot, top_k=0)) == {"x", "y", "z"}, "as the built-in default, but chosen"
        assert drawn(llm, SamplingParams(temperature=2, top_k=0)) == {"x", "y", "z"}
    with LLM(folder, **CPU, generation_config="none") as llm:
        assert drawn(llm, hot) == {"x", "y", "z"}


@pytest.mark.parametrize(("in_file", "given", "asked"), list(itertools.product([None, 0.3], [None, 0.5], [None, 1.0])))
def test_c59_the_order_of_defaults(
    tmp_path: Path, in_file: float | None, given: float | None, asked: float | None
) -> None:
    folder = checkpoint(tmp_path, **({} if in_file is None else {"temperature": in_file, "top_p": 0.9}))
    override = None if given is None else {"temperature": given}
    expected = next(value for value in (asked, given, in_file, 1.0) if value is not None)
    params = SamplingParams() if asked is None else SamplingParams(temperature=asked)
    with LLM(folder, **CPU, override_generation_config=override) as llm:
        resolved = llm.resolve_sampling_params(params)
        assert (resolved.temperature, resolved.top_p) == (expected, 1.0 if in_file is None else 0.9)
        assert llm.get_default_sampling_params() == llm.resolve_sampling_params(SamplingParams())
    with LLM(folder, **CPU, override_generation_config=override, generation_config="none") as llm:
        expected = next(value for value in (asked, given, 1.0) if value is not None)
        assert llm.resolve_sampling_params(params) == SamplingParams(temperature=expected)


def test_c59_do_sample_false_is_greedy_by_default(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, do_sample=False, temperature=0.6, max_new_tokens=3)
    with LLM(folder, **CPU) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
        assert drawn(llm, None) == {"x"}
        assert drawn(llm, SamplingParams(temperature=2)) == {"x", "y", "z"}, "a chosen temperature counts"
        assert len(llm.generate("a")[0].outputs[0].token_ids) == 3
        assert len(llm.generate("a", SamplingParams(max_tokens=16))[0].outputs[0].token_ids) == 16
    with LLM(folder, **CPU, override_generation_config={"temperature": 2.0}) as llm:
        assert drawn(llm, None) == {"x", "y", "z"}
    with LLM(folder, **CPU, override_generation_config={"do_sample": True}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, max_tokens=3)
    with LLM(folder, **CPU, override_generation_config={"do_sample": False, "temperature": 2.0}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0, max_tokens=3)
    assert file_defaults({"do_sample": True, "temperature": 0.6}, {}) == {"temperature": 0.6}


def test_c59_streams_have_the_same_defaults(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, top_k=1, max_new_tokens=1, repetition_penalty=1.05)

    async def main() -> set[str]:
        texts = set()
        async with AsyncLLM(folder, **CPU) as llm:
            for _ in range(40):
                async for output in llm.generate("L", SamplingParams(temperature=2)):
                    texts.add(output.outputs[0].text)
            assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=1, repetition_penalty=1.05)
        return texts

    assert asyncio.run(asyncio.wait_for(main(), 60)) == {"x"}


def test_c59_one_line_says_what_the_file_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path, temperature=0.7, top_k=20, top_p=None, pad_token_id=5, bos_token_id=1)
    for options, lines in (({}, 1), ({"generation_config": "none"}, 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="gapless"), LLM(folder, **CPU, **options) as llm:
            llm.generate(["a", "a"])
            llm.generate("a")
        found = [record.message for record in caplog.records if "generation_config.json" in record.message]
        assert len(found) == lines
        assert all("temperature=0.7, top_k=20 " in line for line in found)


@pytest.mark.parametrize("value", [-1, "hot", [0.5], True])
def test_c59_an_impossible_default_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    folder = checkpoint(tmp_path, temperature=value)
    with pytest.raises(CheckpointError, match=r"^generation_config.json: temperature=.*generation_config='none'"):
        LLM(folder, **CPU)
    LLM(folder, **CPU, generation_config="none").close()
    with pytest.raises(ConfigError, match=r"^override_generation_config: temperature="):
        LLM(folder, **CPU, generation_config="none", override_generation_config={"temperature": value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "vllm"}, "^generation_config='vllm' is unknown; use one of auto, none"),
        ({"override_generation_config": {"top_q": 1}}, "unknown key 'top_q'; the keys are temperature, "),
        ({"override_generation_config": {"do_sample": 1}}, "do_sample=1 must be true or false"),
    ],
)
def test_c59_unknown_options_are_refused(tmp_path: Path, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint(tmp_path), **CPU, **options)


def test_c59_what_was_left_out_stays_left_out_in_copies() -> None:
    defaults = {"temperature": 0.3, "top_k": 5, "max_tokens": 9}
    params = replace(SamplingParams(top_p=0.5), seed=1)
    for copy in (params, replace(params), pickle.loads(pickle.dumps(params))):
        assert copy == SamplingParams(top_p=0.5, seed=1)
        assert copy.with_defaults(defaults) == SamplingParams(temperature=0.3, top_k=5, top_p=0.5, max_tokens=9, seed=1)
    chosen = SamplingParams(temperature=1.0, top_k=0, max_tokens=16)
    assert chosen.with_defaults(defaults) is chosen
    assert SamplingParams(max_tokens=None).with_defaults(defaults).max_tokens is None
    assert SamplingParams(temperature=unchosen(0.0)).with_defaults(defaults).temperature == 0.3
    assert SamplingParams(temperature=unchosen(0.0)).with_defaults({}).greedy
