"""Sliding windows: exactly W keys, on the right layers, whatever the chunks (C47)."""

from typing import Any

import pytest
import torch

from fixtures.checkpoints import f_hist_config, f_hist_model
from fixtures.paged_driver import PagedDriver, model_of
from gapless.errors import UnsupportedModelError
from gapless.model.spec import spec_from_config

PROMPT = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3)).tolist()
MIXED: dict[str, Any] = {
    "use_sliding_window": True,
    "sliding_window": 4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CHUNKS = [1, 3, 4, 5, 24]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_c47_one_layer_sees_exactly_four_keys(chunk: int) -> None:
    driver = PagedDriver(model_of(f_hist_model("mistral", num_hidden_layers=1, sliding_window=4)))
    base = driver.prefill(0, PROMPT, chunk=chunk)
    for back, seen in ((3, True), (4, False), (5, False)):
        changed = list(PROMPT)
        changed[-1 - back] = (changed[-1 - back] + 1) % 128
        difference = float((driver.prefill(0, changed, chunk=chunk) - base).abs().max())
        assert (difference > 0.1) if seen else (difference == 0.0)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize(
    ("arch", "options"),
    [("mistral", {"sliding_window": 4}), ("qwen2", MIXED), ("qwen3", MIXED)],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_c47_forty_tokens_equal_transformers(arch: Any, options: dict[str, Any], chunk: int) -> None:
    reference = f_hist_model(arch, **options)
    want = reference.generate(torch.tensor([PROMPT]), max_new_tokens=40, attention_mask=torch.ones(1, 24))
    got = PagedDriver(model_of(reference)).greedy(0, PROMPT, 40, chunk=chunk)
    assert got == want[0, 24:].tolist()


@pytest.mark.parametrize(
    ("arch", "options", "windows"),
    [
        ("mistral", {"sliding_window": 4}, (4, 4)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("qwen2", {"sliding_window": 4}, (None, None)),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}, (None, None)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, (None, 4)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, (4, 4)),
        ("qwen3", MIXED, (4, None, 4)),
        ("llama", {}, (None, None)),
    ],
)
def test_c47_which_layers_have_a_window(arch: Any, options: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert spec_from_config(f_hist_config(arch, **options)).windows == windows


@pytest.mark.parametrize("window", [0, -1, True, 2.5])
def test_a_window_that_is_no_count_is_refused(window: Any) -> None:
    config = f_hist_config("mistral")
    object.__setattr__(config, "sliding_window", window)
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        spec_from_config(config)


def test_layer_types_that_make_no_sense_are_refused() -> None:
    config = f_hist_config("qwen2")
    object.__setattr__(config, "layer_types", ["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedModelError, match="sliding_window=None"):
        spec_from_config(config)
    object.__setattr__(config, "layer_types", ["full_attention", "chunked_attention"])
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        spec_from_config(config)
    object.__setattr__(config, "layer_types", ["full_attention"])
    with pytest.raises(UnsupportedModelError, match="num_hidden_layers=2"):
        spec_from_config(config)
    for arch, kind, options in (
        ("llama", "sliding_attention", {}),
        ("mistral", "full_attention", {"sliding_window": 4}),
    ):
        config = f_hist_config(arch, **options)
        object.__setattr__(config, "layer_types", [kind, kind])
        with pytest.raises(UnsupportedModelError, match=kind):
            spec_from_config(config)
