"""The rotation itself: pairs, angles and dtype."""

import torch

from gapless.layers.rope import RopeSpec, RopeTable

SPEC = RopeSpec(kind="test", inv_freq=(1.0, 0.25, 0.01), attention_factor=1.0, max_positions=100)


def test_pairs_are_halves_and_angles_grow_with_position() -> None:
    table = RopeTable(SPEC, num_positions=50, device=torch.device("cpu"))
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([49, 3])
    got = table.rotation(positions).apply(x)
    pairs = torch.complex(x[..., :3], x[..., 3:]).to(torch.complex128)
    angles = positions[:, None, None].double() * torch.tensor(SPEC.inv_freq, dtype=torch.float64)
    want = pairs * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(got[..., :3].double(), want.real, atol=1e-5, rtol=0)
    torch.testing.assert_close(got[..., 3:].double(), want.imag, atol=1e-5, rtol=0)


def test_position_zero_is_left_alone_and_the_attention_factor_scales() -> None:
    spec = RopeSpec(kind="test", inv_freq=(1.0, 0.5), attention_factor=1.25, max_positions=100)
    rotation = RopeTable(spec, num_positions=1, device=torch.device("cpu")).rotation(torch.tensor([0]))
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert rotation.apply(x).tolist() == [[[1.25, 2.5, 3.75, 5.0]]]


def test_a_far_position_in_bf16_is_rounded_once() -> None:
    table = RopeTable(SPEC, num_positions=100, device=torch.device("cpu"))
    x = torch.randn(1, 2, 6, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rotation = table.rotation(torch.tensor([99]))
    assert table.table.dtype == torch.float32
    assert torch.equal(rotation.apply(x), rotation.apply(x.float()).to(torch.bfloat16))
