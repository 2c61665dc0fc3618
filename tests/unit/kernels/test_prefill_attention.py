"""The kernel for prefills of whole tiles, compiled for Hopper: no spills, and each kind of warp does its own job."""

from pathlib import Path

import pytest

from gapless.kernels import prefill_attention
from unit.kernels.for_hopper import assert_fits, box, compiled


@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(128, 16, 4), (128, 64, 1), (64, 16, 3), (64, 256, 8)])
def test_attention(head_dim: int, block_size: int, group: int, tmp_path: Path) -> None:
    arguments = {"q": "*bf16", "keys": box(16, 64), "values": box(16, 64), "out": "*bf16", "items": "*i32"}
    arguments |= {"tables": "*i32", "qk_scale": "fp32"}
    arguments |= dict.fromkeys(("num_slots", "q_token_stride", "q_head_stride", "table_stride"), "i32")
    constants = {"NUM_HEADS": 2 * group, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size}
    constants |= {"ITEM_FIELDS": 8, "DEPENDENT_LAUNCH": True}
    binary = compiled(prefill_attention._attend_kernel, arguments, constants)
    # Queries, and two stages of keys and of values.
    assert_fits(binary, (128 + 4 * 128) * head_dim * 2, tmp_path)
    ptx = binary.asm["ptx"]
    # The tensor cores are asked for the next scores before the last values are multiplied, in both groups and loops.
    assert ptx.count("wgmma.wait_group.sync.aligned 1;") == 4
    # Keys and values by boxes of 16 slots and 64 columns; values once more in the branch of the last tile.
    assert ptx.count("cp.async.bulk.tensor.2d") == 3 * (128 // 16) * (head_dim // 64)
