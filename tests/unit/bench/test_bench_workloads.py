"""Workloads repeat exactly, share no prefix, and are refused before a model is loaded if they cannot run."""

import json
from pathlib import Path

import pytest

from gapless.bench.workloads import Lengths, Workload, jsonl_workload, synthetic_workload
from gapless.errors import ConfigError, PromptTooLongError
from gapless.prompt_files import InputError
from gapless.text.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(vocab_size=320, eos_token_id=257, chat_template=None)


def prompts_of(workload: Workload) -> list[list[int]]:
    return [list(request.prompt_token_ids) for request in workload.requests]


def made(requests: int = 5, *, seed: int = 0, spread: float = 0.5, vocab_size: int = 100) -> Workload:
    lengths = Lengths(mean=40, spread=spread)
    return synthetic_workload(requests=requests, prompt=lengths, new=lengths, vocab_size=vocab_size, seed=seed)


def read(tmp_path: Path, *lines: object, **options: object) -> Workload:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    chosen = {"max_tokens": 7, "max_model_len": 100} | options
    return jsonl_workload(path, TOKENIZER, **chosen)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_requests() -> None:
    assert made(seed=3).requests == made(seed=3).requests
    assert prompts_of(made(seed=3)) != prompts_of(made(seed=4))


@pytest.mark.parametrize(("requests", "vocab_size"), [(1, 100), (100, 100), (101, 100), (350, 5)])
def test_no_two_prompts_begin_alike(requests: int, vocab_size: int) -> None:
    digits = 1 if requests <= vocab_size else 2 if requests <= vocab_size**2 else 4
    starts = {tuple(prompt[:digits]) for prompt in prompts_of(made(requests, vocab_size=vocab_size))}
    assert len(starts) == requests
    assert all(0 <= token < vocab_size for start in starts for token in start)


def test_lengths_lie_within_the_spread() -> None:
    workload = made(200)
    prompts = [len(prompt) for prompt in prompts_of(workload)]
    assert (min(prompts), max(prompts)) == (20, 60)
    new = [request.params.max_tokens for request in workload.requests]
    assert len(set(new)) > 20
    assert {len(prompt) for prompt in prompts_of(made(spread=0.0))} == {40}
    assert workload.num_prompt_tokens == sum(prompts)
    assert workload.longest_context == max(p + (n or 0) for p, n in zip(prompts, new, strict=True))


@pytest.mark.parametrize(("mean", "spread"), [(0, 0.0), (-3, 0.0), (4, 1.5), (4, -0.1)])
def test_impossible_lengths_are_refused(mean: int, spread: float) -> None:
    with pytest.raises(ConfigError, match=str(mean) if mean < 1 else str(spread)):
        Lengths(mean=mean, spread=spread)


def test_no_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="requests=0"):
        made(0)


def test_a_context_that_is_too_short_is_named() -> None:
    workload = made(spread=0.0)
    workload.check(79)  # the last of 40 + 40 tokens is never fed back
    with pytest.raises(PromptTooLongError, match=r"request 0 .* 40 and 40 new tokens, and the context holds 78"):
        workload.check(78)


def test_a_shortened_workload_has_the_same_prompts() -> None:
    workload = made()
    short = workload.shortened(3)
    assert prompts_of(short) == prompts_of(workload)
    assert short.max_new_tokens == 3
    assert workload.shortened(1000).requests == workload.requests
    assert workload.first(2).requests == workload.requests[:2]


def test_prompts_of_a_file_are_tokenised_and_end_by_length(tmp_path: Path) -> None:
    workload = read(
        tmp_path, {"prompt": "abc"}, {"prompt_token_ids": [5, 6], "max_tokens": 3}, {"prompt": "d", "temperature": 0.7}
    )
    assert prompts_of(workload) == [TOKENIZER.encode_prompt("abc"), [5, 6], TOKENIZER.encode_prompt("d")]
    assert [request.params.max_tokens for request in workload.requests] == [7, 3, 7]
    assert [request.params.seed for request in workload.requests] == [0, 1, 2]
    assert [request.params.temperature for request in workload.requests] == [0.0, 0.0, 0.7]
    assert workload.ends_by_length
    assert not any(request.stop_token_ids for request in workload.requests)


def test_new_tokens_of_a_file_are_capped_by_the_context(tmp_path: Path) -> None:
    workload = read(tmp_path, {"prompt_token_ids": [1] * 90, "max_tokens": 50})
    assert workload.requests[0].params.max_tokens == 11
    workload.check(100)
    too_long = read(tmp_path, {"prompt_token_ids": [1] * 101})
    with pytest.raises(PromptTooLongError):
        too_long.check(100)


def test_eos_ends_requests_only_if_asked_for(tmp_path: Path) -> None:
    workload = read(tmp_path, {"prompt": "a"}, {"prompt": "b", "ignore_eos": True}, eos_token_ids=frozenset({257}))
    assert [request.stop_token_ids for request in workload.requests] == [{257}, frozenset()]
    assert not workload.ends_by_length


def test_the_first_lines_of_a_file(tmp_path: Path) -> None:
    assert len(read(tmp_path, *[{"prompt": "a"}] * 5, limit=2).requests) == 2


@pytest.mark.parametrize("options", [{"stop": "x"}, {"bad_words": ["x"]}, {"n": 2}])
def test_lines_that_need_their_text_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"prompts\.jsonl:1: .*stop, bad_words or n"):
        read(tmp_path, {"prompt": "a"} | options)


def test_wrong_ids_of_a_file_are_named_by_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"prompts\.jsonl:2: .*999"):
        read(tmp_path, {"prompt": "a"}, {"prompt_token_ids": [999]})


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no prompts"):
        read(tmp_path)
