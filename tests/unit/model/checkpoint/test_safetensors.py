"""C50: missing, truncated or extra files; and files whose header lies."""

import json
import logging
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.checkpoint import open_checkpoint
from gapless.model.checkpoint.safetensors_header import read_safetensors_header
from unit.model.checkpoint.builders import (
    greedy_ids_of,
    logits_of,
    model_of,
    random_model,
    save_sharded,
    write_safetensors,
)

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def test_c50_single_file_and_shards_give_the_saved_model(tmp_path: Path) -> None:
    model = random_model("qwen3")
    model.save_pretrained(tmp_path / "single")
    save_sharded(model, tmp_path / "sharded")
    for name in ("single", "sharded"):
        checkpoint = open_checkpoint(tmp_path / name)
        assert set(checkpoint.tensor_names()) == set(model.state_dict())
        assert checkpoint.total_bytes == sum(t.nbytes for t in model.state_dict().values())
        loaded = model_of(checkpoint)
        assert torch.equal(logits_of(loaded), logits_of(model))
        assert greedy_ids_of(loaded) == greedy_ids_of(model)


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    save_sharded(random_model(), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    seen: list[int] = []
    names = [name for name, _ in checkpoint.tensors(lambda done, total: seen.append(done))]
    assert tuple(names) == checkpoint.tensor_names()
    assert len(seen) == len(names)
    assert seen == sorted(seen)
    assert seen[-1] == checkpoint.total_bytes


def test_c50_missing_shard_is_named_before_anything_is_read(tmp_path: Path) -> None:
    shard = save_sharded(random_model(), tmp_path)[3]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing.*model\."):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [1, 1000])
def test_c50_truncated_shard_is_named(tmp_path: Path, cut: int) -> None:
    shard = save_sharded(random_model(), tmp_path)[2]
    shard.write_bytes(shard.read_bytes()[:-cut])
    with pytest.raises(CheckpointError, match=rf"{shard.name} is cut short: tensor '.*'"):
        open_checkpoint(tmp_path)


def test_c50_shard_longer_than_its_header_is_refused(tmp_path: Path) -> None:
    shard = save_sharded(random_model(), tmp_path)[2]
    shard.write_bytes(shard.read_bytes() + b"\0" * 8)
    with pytest.raises(CheckpointError, match=f"{shard.name} holds .* bytes of data but its header describes"):
        open_checkpoint(tmp_path)


def test_c50_stray_file_beside_an_index_is_not_loaded(tmp_path: Path) -> None:
    model = random_model()
    save_sharded(model, tmp_path)
    save_file({name: torch.zeros_like(t) for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert torch.equal(logits_of(model_of(open_checkpoint(tmp_path))), logits_of(model))


def test_c50_duplicate_and_unindexed_tensors_in_a_shard_are_not_loaded(tmp_path: Path) -> None:
    model = random_model()
    shards = save_sharded(model, tmp_path)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    elsewhere = next(name for name, file in weight_map.items() if file != shards[0].name)
    content = load_file(shards[0])
    content[elsewhere] = torch.full_like(model.state_dict()[elsewhere], 7.0)
    content["never.indexed"] = torch.ones(3)
    save_file(content, shards[0])
    checkpoint = open_checkpoint(tmp_path)
    assert "never.indexed" not in checkpoint.tensor_names()
    assert torch.equal(logits_of(model_of(checkpoint)), logits_of(model))


def test_c50_indexed_tensor_that_its_file_lacks_is_named(tmp_path: Path) -> None:
    shards = save_sharded(random_model(), tmp_path)
    content = load_file(shards[1])
    gone = sorted(content)[0]
    del content[gone]
    save_file(content | {"other": torch.ones(1)}, shards[1])
    with pytest.raises(CheckpointError, match=f"{shards[1].name} does not hold the tensor '{gone}'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"weight_map": {}}', '{"weight_map": 3}', "{}", "[" * 100_000])
def test_c50_corrupt_index_is_named(tmp_path: Path, text: str) -> None:
    save_sharded(random_model(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x.safetensors", "x.bin", 7, None]
)
def test_index_cannot_point_outside_the_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    random_model().save_pretrained(folder)
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    index = {"weight_map": {"w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="file inside the folder"):
        open_checkpoint(folder)


def test_c50_rule_without_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model()
    model.save_pretrained(tmp_path)
    only = tmp_path / "weights.safetensors"
    (tmp_path / "model.safetensors").rename(only)
    assert torch.equal(logits_of(model_of(open_checkpoint(tmp_path))), logits_of(model))

    (tmp_path / "other.safetensors").write_bytes(only.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(other.safetensors, weights.safetensors\)"):
        open_checkpoint(tmp_path)

    only.rename(tmp_path / "model.safetensors")
    save_file({"junk": torch.ones(1)}, tmp_path / "other.safetensors")
    with caplog.at_level(logging.WARNING, logger="gapless"):
        assert torch.equal(logits_of(model_of(open_checkpoint(tmp_path))), logits_of(model))
    assert "ignoring other.safetensors" in caplog.text


def test_c50_empty_folder_missing_config_and_no_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    random_model().config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors file"):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, load_format="dummy").tensor_names() == ()


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    random_model().config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsupportedModelError, match=r"as pickle \(pytorch_model\.bin\)"):
        open_checkpoint(tmp_path)


HOSTILE: dict[str, tuple[dict[str, Any] | bytes, bytes, int | None, str]] = {
    "header of 200 MB in a small file": ({"w": F32}, bytes(16), 200 << 20, "claims a header of 209715200"),
    "header of 2**64 - 1": ({"w": F32}, bytes(16), 2**64 - 1, "claims a header"),
    "header longer than the file": ({"w": F32}, bytes(16), 1000, "claims a header of 1000 bytes but has"),
    "not JSON": (b"nonsense", b"", None, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "not valid JSON"),
    "too deep": (b'{"a":' * 50_000, b"", None, "nested too deeply"),
    "a number of a million digits": (b'{"a": ' + b"9" * 1_000_000 + b"}", b"", None, "not valid JSON"),
    "not an object": (b"[1]", b"", None, "not an object"),
    "duplicate name": (b'{"a": 1, "a": 1}', b"", None, "occurs twice"),
    "overlap": ({"a": F32, "b": F32 | {"data_offsets": [8, 24]}}, bytes(24), None, "overlaps"),
    "same bytes twice": ({"a": F32, "b": F32}, bytes(16), None, "overlaps"),
    "hole": ({"a": F32, "b": F32 | {"data_offsets": [24, 40]}}, bytes(40), None, "leaves a hole"),
    "hole at the start": ({"a": F32 | {"data_offsets": [4, 20]}}, bytes(20), None, "leaves a hole"),
    "beyond the end": ({"a": F32 | {"shape": [2, 4], "data_offsets": [0, 32]}}, bytes(16), None, "cut short"),
    "offsets do not match the shape": ({"a": F32 | {"shape": [2, 3]}}, bytes(16), None, "need 24"),
    "huge shape": ({"a": F32 | {"shape": [2**40, 2**40]}}, bytes(16), None, "need"),
    "negative shape": ({"a": F32 | {"shape": [-2, -2]}}, bytes(16), None, "impossible shape"),
    "boolean shape": ({"a": F32 | {"shape": [True, 4]}}, bytes(16), None, "impossible shape"),
    "float shape": ({"a": F32 | {"shape": [2.0, 2]}}, bytes(16), None, "impossible shape"),
    "nine dimensions": ({"a": F32 | {"shape": [1] * 8 + [4]}}, bytes(16), None, "impossible shape"),
    "reversed offsets": ({"a": F32 | {"data_offsets": [16, 0]}}, bytes(16), None, "impossible offsets"),
    "three offsets": ({"a": F32 | {"data_offsets": [0, 8, 16]}}, bytes(16), None, "impossible offsets"),
    "unknown dtype": ({"a": F32 | {"dtype": "F33"}}, bytes(16), None, "unknown dtype 'F33'"),
    "dtype of another type": ({"a": F32 | {"dtype": ["F32"]}}, bytes(16), None, "unknown dtype"),
    "entry is a list": ({"a": [1]}, b"", None, "is not an object"),
    "metadata is a list": ({"__metadata__": [1]}, b"", None, "__metadata__"),
    "trailing bytes": ({"a": F32}, bytes(17), None, "holds 17 bytes"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused(tmp_path: Path, name: str) -> None:
    header, data, length, message = HOSTILE[name]
    path = write_safetensors(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message):
        read_safetensors_header(path)


def test_header_over_the_limit_is_refused_though_the_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 17 << 20))
        file.truncate(18 << 20)
    with pytest.raises(CheckpointError, match="the limit is 16777216"):
        read_safetensors_header(path)


@pytest.mark.parametrize("size", [0, 7, 8])
def test_tiny_files_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(size))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_safetensors_header(path)


def test_zero_sized_and_scalar_tensors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"empty": torch.empty(0, 3), "scalar": torch.tensor(2.0), "bits": torch.ones(3, dtype=torch.bool)}, path)
    assert {name: e.shape for name, e in read_safetensors_header(path).items()} == {
        "empty": (0, 3),
        "scalar": (),
        "bits": (3,),
    }


def test_c50_dangling_link_to_an_index_is_an_incomplete_download(tmp_path: Path) -> None:
    save_sharded(random_model(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.unlink()
    index.symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(CheckpointError, match=r"index\.json does not exist"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    random_model().save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"config\.json|\.safetensors"):
        open_checkpoint(tmp_path)


def test_mutated_headers_are_refused_or_harmless(tmp_path: Path) -> None:
    """Random bytes of a valid header are changed; whatever our check lets through, the library must open as well."""
    random_model(num_hidden_layers=1).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    original = path.read_bytes()
    (length,) = struct.unpack("<Q", original[:8])
    draw = random.Random(8)
    refused = 0
    for _ in range(400):
        data = bytearray(original)
        for _ in range(draw.choice((1, 1, 2, 8))):
            data[draw.randrange(8 + length)] = draw.choice((draw.randrange(256), draw.choice(b'0123456789[]{}",:')))
        path.write_bytes(data)
        try:
            for _, tensor in open_checkpoint(tmp_path).tensors():
                assert tensor.numel() < 1 << 20
        except CheckpointError:
            refused += 1
    assert 100 < refused < 400
