"""Loading weights: every place filled, tied heads as transformers has them, and messages that name the tensor."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fixtures.checkpoints import f_hist_model, save
from fixtures.paged_driver import PagedDriver
from gapless.errors import CheckpointError
from gapless.layers.attention import TorchAttention
from gapless.layers.ops import TorchOps
from gapless.model.decoder import DecoderModel
from gapless.model.spec import spec_from_config

PROMPT = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(3)).tolist()
LAYER = "model.layers.1."


def empty_model(reference: PreTrainedModel, dtype: torch.dtype = torch.float32) -> DecoderModel:
    spec = spec_from_config(reference.config)
    return DecoderModel(
        spec,
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=64,
        attention=TorchAttention(),
        ops=TorchOps(),
    )


def folder_with(tmp_path: Path, model: PreTrainedModel, *, head: Tensor | None = None) -> dict[str, Tensor]:
    """Save ``model``, with ``head`` added to its file if given, and give the file's tensors."""
    file = save(model, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    if head is not None:
        tensors["lm_head.weight"] = head
        save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def logits_by_transformers(folder: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([PROMPT])).logits[0, -1]
    return logits


def test_c43_tied_without_head(tmp_path: Path) -> None:
    reference = f_hist_model(tie_word_embeddings=True)
    tensors = folder_with(tmp_path, reference)
    assert "lm_head.weight" not in tensors
    model = empty_model(reference)
    assert model.load_weights(tensors.items()).tied
    got = PagedDriver(model).prefill(0, PROMPT)
    torch.testing.assert_close(got, logits_by_transformers(tmp_path), atol=1e-4, rtol=0)


def test_c43_tied_with_the_same_head_in_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = f_hist_model(tie_word_embeddings=True)
    head = reference.model.embed_tokens.weight.detach().clone()
    tensors = folder_with(tmp_path, reference, head=head)
    model = empty_model(reference)
    report = model.load_weights(tensors.items())
    assert report.tied
    assert not report.unknown
    assert not caplog.records
    got = PagedDriver(model).prefill(0, PROMPT)
    torch.testing.assert_close(got, logits_by_transformers(tmp_path), atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_first", [True, False])
def test_c43_tied_with_another_head_uses_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head_first: bool
) -> None:
    reference = f_hist_model(tie_word_embeddings=True)
    head = 0.35 * torch.randn(128, 64, generator=torch.Generator().manual_seed(5))
    tensors = folder_with(tmp_path, reference, head=head)
    ordered = sorted(tensors.items(), key=lambda item: (item[0] == "lm_head.weight") != head_first)
    model = empty_model(reference)
    with caplog.at_level(logging.WARNING, logger="gapless"):
        assert not model.load_weights(ordered).tied
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "lm_head.weight" in caplog.text
    got = PagedDriver(model).prefill(0, PROMPT)
    torch.testing.assert_close(got, logits_by_transformers(tmp_path), atol=1e-4, rtol=0)


def test_c43_untied_without_head_names_it() -> None:
    reference = f_hist_model()
    tensors = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        empty_model(reference).load_weights(tensors.items())


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("llama", "self_attn.q_proj.weight"),
        ("llama", "mlp.up_proj.weight"),
        ("llama", "post_attention_layernorm.weight"),
        ("qwen2", "self_attn.v_proj.bias"),
        ("qwen3", "self_attn.k_norm.weight"),
    ],
)
def test_c43_a_part_of_a_stacked_weight_that_is_missing_is_named(arch: Any, name: str) -> None:
    reference = f_hist_model(arch)
    tensors = reference.state_dict()
    del tensors[LAYER + name]
    with pytest.raises(CheckpointError, match=(LAYER + name).replace(".", r"\.")):
        empty_model(reference).load_weights(tensors.items())


def test_no_weights_at_all_names_the_first_and_counts_the_rest() -> None:
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight.* and 13 more"):
        empty_model(f_hist_model()).load_weights([])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", [LAYER + "self_attn.k_proj.weight", LAYER + "input_layernorm.weight", "lm_head.weight"]
)
def test_a_wrong_shape_names_tensor_found_and_expected(name: str, tied: bool) -> None:
    reference = f_hist_model(tie_word_embeddings=tied)
    tensors = dict(reference.state_dict())
    right = list(tensors[name].shape)
    wrong = [*right[:-1], right[-1] + 1]
    tensors[name] = torch.zeros(wrong)
    with pytest.raises(CheckpointError) as error:
        empty_model(reference).load_weights(tensors.items())
    assert name in str(error.value)
    assert f"shape {wrong}, expected {right}" in str(error.value)


def test_a_vector_is_not_spread_over_a_matrix() -> None:
    """``copy_`` would broadcast it."""
    reference = f_hist_model("qwen3")
    tensors = dict(reference.state_dict())
    tensors[LAYER + "self_attn.q_norm.weight"] = torch.ones(1)
    with pytest.raises(CheckpointError, match="q_norm"):
        empty_model(reference).load_weights(tensors.items())


def test_integer_weights_are_refused() -> None:
    reference = f_hist_model()
    tensors = dict(reference.state_dict())
    tensors[LAYER + "mlp.down_proj.weight"] = torch.zeros(64, 96, dtype=torch.int8)
    with pytest.raises(CheckpointError, match=r"down_proj.*int8"):
        empty_model(reference).load_weights(tensors.items())


@pytest.mark.parametrize("name", [LAYER + "mlp.down_proj.weight", "lm_head.weight"])
def test_a_name_given_twice_is_refused(name: str) -> None:
    reference = f_hist_model(tie_word_embeddings=True)
    tensors = reference.state_dict()
    with pytest.raises(CheckpointError, match="twice"):
        empty_model(reference).load_weights([*tensors.items(), (name, tensors[name])])


def test_unknown_tensors_are_listed_and_known_buffers_are_not() -> None:
    reference = f_hist_model()
    tensors = dict(reference.state_dict())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    tensors["model.layers.0.self_attn.extra"] = torch.ones(1)
    tensors["value_head.weight"] = torch.ones(1)
    report = empty_model(reference).load_weights(tensors.items())
    assert report.unknown == ("model.layers.0.self_attn.extra", "value_head.weight")
    assert report.num_loaded == len(reference.state_dict())
    assert not report.tied


def test_loading_again_replaces_every_weight() -> None:
    first, second = (f_hist_model("qwen3", seed=seed, tie_word_embeddings=seed == 0) for seed in (0, 1))
    model = empty_model(second)
    model.load_weights(first.state_dict().items())
    before = PagedDriver(model).prefill(0, PROMPT)
    model.load_weights(second.state_dict().items())
    fresh = empty_model(second)
    fresh.load_weights(second.state_dict().items())
    after = PagedDriver(model).prefill(0, PROMPT)
    assert torch.equal(after, PagedDriver(fresh).prefill(0, PROMPT))
    assert not torch.equal(after, before)


def test_tensors_are_read_one_at_a_time_and_copied() -> None:
    """A checkpoint yields views of a mapped file that end with the walk."""
    reference = f_hist_model(tie_word_embeddings=True)
    weights = reference.state_dict()

    def walk() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sorted(weights.items()):
            lent = tensor.clone()
            yield name, lent
            lent.fill_(float("nan"))

    model = empty_model(reference)
    assert model.load_weights(walk()).tied
    assert PagedDriver(model).prefill(0, PROMPT).isfinite().all()


def test_dummy_weights_follow_the_seed() -> None:
    reference = f_hist_model("qwen3", attention_bias=True)
    models = [empty_model(reference, torch.bfloat16) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        model.init_dummy(seed)
    same, again, other = (PagedDriver(model).prefill(0, PROMPT) for model in models)
    assert torch.equal(same, again)
    assert not torch.equal(same, other)
    assert float(models[0].embedding.float().std()) == pytest.approx(0.02, rel=0.05)
    norm = models[0].layers[0].qk_norm
    assert norm is not None
    assert torch.equal(norm[0], norm[3])
    assert not torch.equal(norm[3], norm[4])
    assert float(models[0].final_norm.float().mean()) == pytest.approx(1.0, abs=0.05)


def test_weight_bytes_are_what_a_step_reads() -> None:
    reference = f_hist_model("qwen3", tie_word_embeddings=True)
    model = empty_model(reference)
    held = 4 * sum(p.numel() for p in reference.parameters())
    repeated_norms = 2 * (4 - 1 + 2 - 1) * 32 * 4
    assert model.weight_bytes == held + repeated_norms
    model.init_dummy(0)
    assert model.weight_bytes == held + repeated_norms
