"""The tables of tiles: written and read, and those that ship."""

from pathlib import Path

import pytest

from gapless.kernels.skinny import SkinnyTile
from gapless.kernels.tuned_table import ProductKey, StreamedTile, TunedTable, table_path

SHIPPED = sorted(table_path("any").parent.glob("*.json"))
HOPPER_SHARED_BYTES = 227 << 10
GATE = ProductKey(kind="gate", out_features=512, in_features=256, tokens=16)
HEADS = ProductKey(kind="heads", out_features=512, in_features=256, tokens=32)
FIRST = SkinnyTile(block_n=64, block_k=128, splits=1, num_warps=4, num_stages=4)
SECOND = StreamedTile(splits=1, num_stages=6)


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    table = TunedTable({GATE: FIRST, HEADS: FIRST}, {GATE: SECOND})
    table.write(tmp_path / "tuned" / "some-device.json", {"device": "some"})
    assert TunedTable.read(tmp_path / "tuned" / "some-device.json") == table


def test_a_second_tile_is_found_only_by_devices_that_can_run_it() -> None:
    table = TunedTable({GATE: FIRST, HEADS: FIRST}, {GATE: SECOND})
    assert table.find("gate", 512, 256, 9) == FIRST
    assert table.find("gate", 512, 256, 9, streamed=True) == SECOND
    assert table.find("heads", 512, 256, 17, streamed=True) == FIRST
    assert table.find("gate", 512, 256, 17, streamed=True) is None
    assert table.find("gate", 512, 256, 0, streamed=True) is None
    assert table.find("gate", 512, 256, 129, streamed=True) is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_fits_the_matrices_and_hopper(path: Path) -> None:
    """Of the rings, one must fit into a multiprocessor and two must not, see ``streamed_products``."""
    table = TunedTable.read(path)
    assert all(tile.fits(key.out_features, key.in_features) for key, tile in table.tiles.items())
    for key, tile in table.streamed.items():
        assert tile.fits(key.out_features, key.in_features)
        boxes = 2 if key.kind == "gate" else 1
        ring = tile.num_stages * (boxes * StreamedTile.ROWS + key.tokens) * StreamedTile.STEP * 2
        assert HOPPER_SHARED_BYTES / 2 < ring < HOPPER_SHARED_BYTES


def test_a_table_ships() -> None:
    assert [path.stem for path in SHIPPED] == ["nvidia-h200"]
