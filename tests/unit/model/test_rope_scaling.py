"""RoPE settings in every spelling, and what must be refused or never scaled twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fixtures.checkpoints import f_hist_config, f_hist_model, save
from fixtures.paged_driver import PagedDriver, model_of
from gapless.errors import CheckpointError, ConfigError, UnsupportedModelError
from gapless.model.spec import spec_from_config

PROMPT = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3)).tolist()
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
}


def config_in_old_spelling(folder: Path, kind: str, key: str) -> Any:
    """A saved checkpoint whose config.json is rewritten as it was before ``rope_parameters``."""
    model = f_hist_model(rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **SCALINGS[kind]})
    path = save(model, folder) / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config["rope_theta"] = 5000.0
    config["rope_scaling"] = {key: kind, **SCALINGS[kind]}
    path.write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_c44_old_and_new_spelling_are_one(tmp_path: Path, kind: str, key: str) -> None:
    new = f_hist_config(rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **SCALINGS[kind]})
    spec = spec_from_config(new)
    assert spec.rope.kind == kind
    assert spec_from_config(config_in_old_spelling(tmp_path, kind, key)) == spec


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_c44_a_dropped_setting_would_show(kind: str) -> None:
    plain = PagedDriver(model_of(f_hist_model())).prefill(0, PROMPT)
    scaled = f_hist_model(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[kind]})
    assert (PagedDriver(model_of(scaled)).prefill(0, PROMPT) - plain).abs().max() > 5


def test_c44_theta_is_read_where_it_is() -> None:
    inside = f_hist_config(rope_parameters={"rope_type": "default", "rope_theta": 123.0})
    assert spec_from_config(inside).rope.inv_freq[1] == pytest.approx(123.0 ** (-2 / 32))
    outside = f_hist_config(rope_theta=123.0)
    assert spec_from_config(outside) == spec_from_config(inside)


def test_c44_yarn_keeps_its_attention_factor() -> None:
    settings = {"rope_type": "yarn", "rope_theta": 10000.0, **SCALINGS["yarn"]}
    assert spec_from_config(f_hist_config(rope_parameters=settings)).rope.attention_factor == pytest.approx(
        1.13863, abs=1e-4
    )
    named = {**settings, "attention_factor": 0.5}
    assert spec_from_config(f_hist_config(rope_parameters=named)).rope.attention_factor == 0.5


def test_c44_an_unknown_type_is_refused_by_name() -> None:
    config = f_hist_config()
    config.rope_parameters = {"rope_type": "spiral", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="'spiral'"):
        spec_from_config(config)
    config.rope_parameters = {"rope_type": "longrope", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModelError, match="'longrope'"):
        spec_from_config(config)


def test_c44_incomplete_settings_are_an_error() -> None:
    config = f_hist_config()
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0}
    with pytest.raises(CheckpointError, match="factor"):
        spec_from_config(config)
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 0.0}
    with pytest.raises(CheckpointError, match="linear"):
        spec_from_config(config)


def test_c44_the_length_follows_the_config_and_is_not_scaled() -> None:
    settings = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    spec = spec_from_config(f_hist_config(rope_parameters=settings))
    assert spec.max_position_embeddings == 512
    spec.check_max_model_len(512)
    with pytest.raises(ConfigError, match="max_model_len=513"):
        spec.check_max_model_len(513)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_a_length_beyond_the_frequencies_is_refused(kind: str) -> None:
    settings = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS.get(kind, {})}
    model = f_hist_model(rope_parameters=settings)
    with pytest.raises(ConfigError, match=f"max_model_len=600.*512.*{kind}"):
        model_of(model, max_model_len=600)


def test_reading_a_config_leaves_it_alone() -> None:
    config = f_hist_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    before = config.to_dict()
    spec_from_config(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("inside", [True, False])
def test_c46_partial_rotary_is_refused_by_name(inside: bool) -> None:
    config = f_hist_config()
    if inside:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    else:
        config = f_hist_config(partial_rotary_factor=0.5)
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor=0\.5"):
        spec_from_config(config)


def test_settings_for_each_layer_type_are_refused() -> None:
    config = f_hist_config("qwen2")
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }
    with pytest.raises(UnsupportedModelError, match="differ between layers"):
        spec_from_config(config)
