"""Sampling on a CUDA device: as on the CPU, the same at every depth, without a hidden host sync."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from fixtures.checkpoints import f_hist_model, save
from fixtures.served_models import hist_checkpoint, random_prompts
from fixtures.watched_engine import WatchedEngine
from gapless import LLM, SamplingParams
from gapless.engine.request import EngineRequest
from gapless.kernels.draw import draw_tokens_triton
from gapless.kernels.penalties import apply_penalties_triton
from gapless.sampling.drawing import draw_tokens
from gapless.sampling.filters import filter_logits
from gapless.sampling.penalties import PROMPT_BIT, apply_penalties

pytestmark = pytest.mark.gpu

VOCAB = 128_256
CUDA = torch.device("cuda")


def options(index: int) -> SamplingParams:
    """Everything that there is, in turn and together; the seeds are fixed."""
    base = SamplingParams(temperature=0.0, max_tokens=6 + index % 20, seed=index)
    match index % 8:
        case 0:
            return base
        case 1:
            return replace(base, temperature=0.8, top_p=0.9)
        case 2:
            return replace(base, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
        case 3:
            return replace(base, temperature=1.0, top_k=20, repetition_penalty=1.2, logprobs=3)
        case 4:
            return replace(base, logit_bias={5: 3.0, 6: -100.0}, bad_words=[[5], [9, 3], [1, 2, 3]], logprobs=0)
        case 5:
            return replace(base, temperature=0.9, min_p=0.05, allowed_token_ids=range(0, 100, 3))
        case 6:
            return replace(base, prompt_logprobs=2, logprobs=5)
        case _:
            return replace(base, temperature=1.2, top_k=40, top_p=0.95, bad_words=[[i, 7] for i in range(40)])


def engine_requests(count: int) -> list[EngineRequest]:
    prompts = random_prompts([1 + (index * 29) % 70 for index in range(count)])
    return [
        EngineRequest(prompt_token_ids=prompt, params=params, bad_words=[tuple(word) for word in params.bad_words])
        for prompt, params in ((prompt, options(index)) for index, prompt in enumerate(prompts))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(f_hist_model(), tmp_path_factory.mktemp("hist"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_depths_give_the_same_tokens_with_every_option_and_no_host_sync(folder: Path, dtype: str) -> None:
    work = engine_requests(48)
    results = []
    for depth in (1, 2, 3):
        settings: dict[str, Any] = {"load_format": "auto", "dtype": dtype, "depth": depth}
        with WatchedEngine(folder, enable_prefix_caching=False, **settings) as engine:
            # The first run compiles kernels and takes the memory of the tables; the second is checked for syncs.
            first = engine.run(work, may_wait=True)
            results.append(engine.run(work))
            assert results[-1] == first
    assert results[0] == results[1] == results[2]


def test_a_tight_pool_gives_the_tokens_of_an_ample_one(folder: Path) -> None:
    work = engine_requests(32)
    settings: dict[str, Any] = {"load_format": "auto", "dtype": "float32"}
    with WatchedEngine(folder, depth=2, **settings) as engine:
        ample = engine.run(work, may_wait=True)
    with WatchedEngine(folder, depth=3, num_blocks=12, max_model_len=128, chunk_size=16, **settings) as engine:
        tight = engine.run(work, may_wait=True)
        assert engine.built.engine.counters().preemptions > 0
    assert tight == ample


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_tokens_and_log_probs_of_the_cpu(tmp_path: Path, depth: int) -> None:
    """In fp32, where the gaps between logits, and between draws and their borders, are above rounding."""
    folder, _ = hist_checkpoint(tmp_path)
    prompts = random_prompts([1 + (index * 29) % 70 for index in range(24)])
    params = [options(index) for index in range(24)]
    outputs = []
    for device in ("cpu", "cuda"):
        with LLM(folder, device=device, dtype="float32", num_blocks=256, depth=depth) as llm:
            outputs.append(llm.generate(prompts, params))
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for places, others in (
            (ours.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (ours.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert (places is None) == (others is None)
            for place, other in zip(places or (), others or (), strict=True):
                values, expected = ({t: x.logprob for t, x in (each or {}).items()} for each in (place, other))
                assert values == pytest.approx(expected, abs=1e-3)


def draw_arguments(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Any, ...]:
    count = len(logits)
    return (
        logits,
        torch.arange(count, device=CUDA),
        logits.amax(dim=-1),
        torch.full((count,), temperature, device=CUDA),
        torch.full((count,), top_k, dtype=torch.int32, device=CUDA),
        torch.full((count,), top_p, device=CUDA),
        torch.full((count,), min_p, device=CUDA),
        torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).to(CUDA),
    )


@pytest.mark.parametrize("spread", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.8, 50, 0.9, 0.0),
        (1.0, 0, 0.95, 0.0),
        (1.0, 5000, 1.0, 0.0),
        (0.7, 0, 1.0, 0.02),
        (1.3, 20_000, 0.8, 0.001),
        (1e-5, 0, 0.9, 0.0),
    ],
)
def test_draws_are_those_of_the_plain_version(
    spread: float, coarse: bool, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Against fp64: the numbers fall into their tokens' stretches, up to what fp32 sums can tell apart.

    Among 128k tokens of nearly equal probability a rounded sum moves a border by a token or two, so the plain version
    in fp32 does not give each of fp64's tokens either (2 of 256 at spread 2 with top_p alone).
    """
    logits = torch.randn(256, VOCAB, generator=torch.Generator().manual_seed(9)).to(CUDA) * spread
    if coarse:
        logits = logits.to(torch.bfloat16).float()
    arguments = draw_arguments(logits, temperature, top_k, top_p, min_p)
    drawn = draw_tokens_triton(*arguments, needs_filter=True)[:, None]
    expected = draw_tokens(*arguments, needs_filter=True)[:, None]
    assert int((drawn != expected).sum()) <= 8
    top_ks, top_ps, min_ps, numbers = arguments[4:]
    tempered = (logits.double() - logits.double().amax(-1, keepdim=True)) / temperature
    kept = filter_logits(tempered, top_ks, top_ps.double(), min_ps.double())
    cumulative = kept.softmax(-1).cumsum(-1)
    end = cumulative.gather(1, drawn)
    start = torch.where(drawn > 0, cumulative.gather(1, (drawn - 1).clamp(min=0)), 0)
    assert bool(((start - 1e-4 <= numbers[:, None]) & (numbers[:, None] <= end + 1e-4)).all())
    least_kept = tempered.masked_fill(kept.isinf(), torch.inf).amin(-1, keepdim=True)
    assert bool((tempered.gather(1, drawn) >= least_kept - 1e-3).all())


def test_penalties_are_those_of_the_plain_version() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(64, VOCAB, generator=generator).to(CUDA) * 3
    counts = torch.randint(-20, 4, (70, VOCAB), generator=generator).clamp(min=0)
    prompt = (torch.rand(70, VOCAB, generator=generator) < 0.01) * PROMPT_BIT
    history = (counts + prompt).to(torch.int32).to(CUDA)
    values = torch.rand(70, 3, generator=generator).to(CUDA) + 0.5
    samples = torch.randperm(64, generator=generator)[:40].to(CUDA)
    rows = torch.randperm(70, generator=generator)[:40].to(CUDA)
    expected = logits.clone()
    apply_penalties(expected, samples, rows, history, values)
    apply_penalties_triton(logits, samples, rows, history, values)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
