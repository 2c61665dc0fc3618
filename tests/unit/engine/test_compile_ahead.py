"""What is compiled ahead is all that steps of other shapes need; the compiler itself stands still here."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime import driver

import gapless.layers.linear
from gapless.config import EngineConfig
from gapless.engine import compile_ahead
from gapless.engine.device_kernels import DeviceKernels
from gapless.kernels import launch
from gapless.kernels.draw import draw_tokens_triton
from gapless.kernels.layer_ops import TritonOps
from gapless.kernels.paged_attention import TritonAttention
from gapless.kernels.penalties import apply_penalties_triton
from gapless.kernels.skinny import SkinnyTile
from gapless.kernels.step_edges import TritonEdges, largest_logits_triton
from gapless.kernels.tuned_table import ProductKey, ProductKind, TunedTable
from gapless.model.checkpoint import open_checkpoint
from gapless.model.decoder import DecoderModel
from gapless.pipeline.streams.cpu import CpuQueues
from unit.kernels.without_device import NoDevice

CPU = torch.device("cpu")
SHAPES = ((1,), (3,), (1, 1, 5), (17,), (40, 5), (1,) * 30, (65,), (129,), (1,) * 40 + (700,), (20,) * 20, (1500,))
PRODUCTS: tuple[tuple[ProductKind, int, int], ...] = (
    ("heads", 512, 64),
    ("residual", 64, 256),
    ("gate", 256, 64),
    ("residual", 64, 128),
    ("logits", 320, 64),
)


def tiles() -> TunedTable:
    tile = SkinnyTile(block_n=32, block_k=16, splits=1, num_warps=4, num_stages=2)
    return TunedTable(
        {
            ProductKey(kind=kind, out_features=rows, in_features=columns, tokens=tokens): tile
            for kind, rows, columns in PRODUCTS
            for tokens in compile_ahead.KERNEL_WIDTHS
        }
    )


@pytest.mark.parametrize("max_rows", [40, 256])
def test_steps_of_other_shapes_launch_nothing_new(max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_active", NoDevice())
    monkeypatch.setattr(launch, "_known", {})
    monkeypatch.setattr(gapless.layers.linear, "_can_pack", lambda dtype, device: False)
    variants: set[Any] = set()
    monkeypatch.setattr(launch, "_compile", lambda known, key, args, kwargs: variants.add((known.kernel.__name__, key)))
    spec = replace(open_checkpoint("tiny-llama", load_format="dummy").spec, head_dim=64)
    attention = TritonAttention(num_multiprocessors=16, dependent_launch=True, gluon=True)
    ops = TritonOps(CPU, table=tiles(), dependent_launch=True)
    model = DecoderModel(spec, dtype=torch.bfloat16, device=CPU, max_model_len=2048, attention=attention, ops=ops)
    kernels = DeviceKernels(
        attention=attention,
        ops=ops,
        draw=draw_tokens_triton,
        penalties=apply_penalties_triton,
        largest=largest_logits_triton,
        edges=TritonEdges(),
        compile_only=launch.compile_only,
    )
    config = EngineConfig(max_rows=max_rows).for_device("cuda")

    def go() -> None:
        compile_ahead.compile_ahead(model, config, kernels, CpuQueues())

    go()
    names = {name for name, _ in variants}
    assert {"attend_kernel", "_draw_kernel", "_keep_kernel", "_residual_kernel", "_silu_and_mul_kernel"} <= names
    before = set(variants)
    idle = compile_ahead._idle_batch
    for shape in SHAPES:
        if len(shape) > max_rows:
            continue
        monkeypatch.setattr(
            compile_ahead, "_idle_batch", lambda _, *, reserved_row, s=shape: idle(s, reserved_row=max_rows)
        )
        go()
    assert variants == before
