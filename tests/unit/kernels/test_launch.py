"""Launches that do not go through Triton say what Triton would say, and are of the variant that it would choose."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver, jit

from gapless.kernels import launch, streamed_products
from gapless.kernels.launch import compile_only, launch_kernel
from unit.kernels.without_device import NoDevice, NotingLauncher

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

BF16, FP16 = torch.bfloat16, torch.float16


@triton.jit(do_not_specialize=["count", "raw"], do_not_specialize_on_alignment=["packed", "even"])
def add_kernel(x, packed, raw, out, count, stride, even, scale, SIZE: tl.constexpr, FLAG: tl.constexpr = False):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if FLAG:
        count += even
    total = tl.load(x + i * stride, mask=i < count) + tl.load(packed + i) + tl.load(raw + i)
    tl.store(out + i, total * scale)


@triton.jit
def bad_kernel(x, SIZE: tl.constexpr):
    tl.static_assert(SIZE == 0, "never right")
    tl.store(x, SIZE)


@dataclass(frozen=True)
class Call:
    args: tuple[Any, ...]
    named: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[NoDevice]:
    """No device, nothing known yet, and nothing compiled in this process."""
    fake = NoDevice()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(launch, "_known", {})
    monkeypatch.setattr(NotingLauncher, "launches", [])
    kernels = (add_kernel, bad_kernel, streamed_products._product_kernel)
    for kernel in kernels:
        kernel.device_caches.clear()
    yield fake
    for kernel in kernels:
        kernel.device_caches.clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a name with every variant that is compiled."""
    names: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **told: names.append(told["fn"].name))
    return names


def tensor(offset: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    """64 numbers, some of them past a multiple of 16 bytes."""
    return torch.zeros(64, dtype=dtype)[offset:]


def call(named: dict[str, Any] | None = None, **changed: Any) -> Call:
    """One of ``add_kernel``; ``changed`` are plain arguments."""
    plain = {"x": tensor(), "packed": tensor(), "raw": tensor(), "out": tensor(), "count": 5, "stride": 3}
    plain |= {"even": 6, "scale": 0.5} | changed
    return Call(tuple(plain.values()), {"SIZE": 16, "num_warps": 4} | (named or {}))


def calls() -> Iterator[Call]:
    """Calls that differ from the first in one thing or two."""
    yield call()
    for name in ("x", "packed", "raw", "out"):
        yield call(**{name: tensor(1)})
        yield call(**{name: tensor(8)})
        yield call(**{name: tensor(dtype=FP16)})
    yield call(x=tensor(1), out=tensor(2))
    for name, value in itertools.product(("count", "stride", "even"), (0, 1, 2, 16, 32, -1, 2**31, 2**63, True, None)):
        yield call(**{name: value})
    yield from (call(scale=scale) for scale in (1.5, 1.0, 1, 16))
    yield call({"SIZE": 32})
    yield call({"FLAG": True})
    yield call({"num_warps": 8})
    yield call({"launch_pdl": True})
    yield call({"launch_pdl": False})


def tritons_key(kernel: Any, call: Call) -> str:
    """The key under which Triton itself keeps the variant."""
    binder = kernel.device_caches[0][4]
    _, specialization, options = binder(*call.args, **call.named)
    return jit.compute_cache_key({}, specialization, options)


def check_keys(kernel: Any, calls: list[Call]) -> None:
    read = launch._reader(kernel, 0, calls[0].args)
    for a, b in itertools.combinations(calls, 2):
        ours = read(a.args, a.named)[0], read(b.args, b.named)[0]
        assert None not in ours
        same = tritons_key(kernel, a) == tritons_key(kernel, b)
        assert (ours[0] == ours[1]) == same, f"{a}\n{b}"


def test_keys_differ_exactly_where_tritons_do() -> None:
    check_keys(add_kernel, list(calls()))


def box(rows: int = 16, dtype: torch.dtype = BF16, size: int = 64) -> TensorDescriptor:
    matrix = torch.zeros(size, 128, dtype=dtype)
    layout = gl.NVMMASharedLayout.get_default_for([rows, 128], gl.bfloat16 if dtype == BF16 else gl.float16)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, 128], layout)


def test_keys_of_descriptors_differ_where_tritons_do() -> None:
    boxes = ((box(), box()), (box(), box(32)), (box(32), box()), (box(dtype=FP16), box()), (box(size=32), box()))
    named = {"N": 64, "K": 128, "SPLITS": 1, "STAGES": 2, "DEPENDENT_LAUNCH": False}
    outs = (tensor(), tensor(1), tensor(dtype=FP16))
    every = [Call((*pair, out, count), named) for pair in boxes for out in outs for count in (1, 5)]
    check_keys(streamed_products._product_kernel, every)


def plainly(launched: tuple[Any, ...]) -> tuple[Any, ...]:
    """A launch, with addresses in place of tensors and without hooks."""
    *head, _launch_metadata, _enter, _leave = launched[:13]
    return (*head, *(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in launched[13:]))


def test_a_known_variant_is_launched_as_triton_launches(device: NoDevice, compiled: list[str]) -> None:
    first = call()
    launch_kernel(add_kernel, (3,), *first.args, **first.named)
    launch_kernel(add_kernel, (3,), *first.args, **first.named)
    by_triton, ours = NotingLauncher.launches
    assert [isinstance(arg, Tensor) for arg in ours] == [False] * len(ours)
    assert plainly(ours) == plainly(by_triton)
    assert ours[:5] == (3, 1, 1, device.STREAM, 1001)
    assert ours[13:] == (*(arg.data_ptr() for arg in first.args[:4]), 5, 3, 6, 0.5, 16, False)
    # Other tensors and numbers of the same variant are those of the call, another variant is another kernel.
    other = call(x=tensor(8), count=9, scale=2.5)
    launch_kernel(add_kernel, (2, 4, 6), *other.args, **other.named)
    launched = NotingLauncher.launches[-1]
    assert launched[:5] == (2, 4, 6, device.STREAM, 1001)
    assert launched[13:] == (*(arg.data_ptr() for arg in other.args[:4]), 9, 3, 6, 2.5, 16, False)
    assert compiled == ["add_kernel"]
    for _ in range(2):
        launch_kernel(add_kernel, (3,), *call(stride=16).args, **first.named)
        assert NotingLauncher.launches[-1][4] == 1002
    assert compiled == ["add_kernel"] * 2


def test_calls_of_another_form_are_tritons(compiled: list[str]) -> None:
    first = call()
    *plain, scale = first.args
    for _ in range(3):
        launch_kernel(add_kernel, (1,), *plain, scale=scale, **first.named)
        launch_kernel(add_kernel, (1,), *first.args, **first.named)
        launch_kernel(add_kernel, (1,), *call(raw=triton.reinterpret(tensor(), tl.bfloat16)).args, **first.named)
    assert all(isinstance(launched[13], Tensor) for launched in NotingLauncher.launches)
    with pytest.raises(TypeError):
        launch_kernel(add_kernel, (1,), *first.args, 1, 2, 3, **first.named)
    with pytest.raises(KeyError):
        launch_kernel(add_kernel, (1,), *first.args, **first.named, no_such_option=1)


def test_hooks_hear_of_every_launch() -> None:
    first = call()
    heard: list[str] = []

    def hook(metadata: Any) -> None:
        heard.append(metadata.get()["name"])

    for wanted in (0, 0, 1, 2):
        launch_kernel(add_kernel, (1,), *first.args, **first.named)
        assert len(heard) == wanted
        knobs.runtime.launch_enter_hook.add(hook) if len(NotingLauncher.launches) > 1 else None
    knobs.runtime.launch_enter_hook.remove(hook)
    launch_kernel(add_kernel, (1,), *first.args, **first.named)
    assert heard == ["add_kernel"] * 2


def test_compile_only_compiles_each_variant_once_and_launches_nothing(device: NoDevice, compiled: list[str]) -> None:
    variants = [call(), call(x=tensor(1)), call({"FLAG": True})]
    device.set_current_device(1)
    with compile_only():
        for each in variants * 3:
            launch_kernel(add_kernel, (1,), *each.args, **each.named)
    assert compiled == ["add_kernel"] * 3
    assert device.loaded_on == [1] * 3
    assert NotingLauncher.launches == []
    for each in variants * 2:
        launch_kernel(add_kernel, (1,), *each.args, **each.named)
    assert compiled == ["add_kernel"] * 3
    assert len(NotingLauncher.launches) == 6
    assert device.loaded_on == [1] * 3


def test_launchers_that_stay_are_loaded_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made_by: list[int] = []
    monkeypatch.setattr(NotingLauncher, "launch", lambda self, *args: made_by.append(self.made_by))
    variants = [call(), call(x=tensor(1)), call({"FLAG": True})]
    with compile_only():
        for each in variants:
            launch_kernel(add_kernel, (1,), *each.args, **each.named)
    for each in variants:
        launch_kernel(add_kernel, (1,), *each.args, **each.named)
    assert made_by == [threading.get_ident()] * 3


def test_compile_only_raises_what_a_kernel_raises_and_ends(compiled: list[str]) -> None:
    first = call()
    with pytest.raises(triton.CompilationError, match="never right"), compile_only():  # noqa: PT012
        launch_kernel(bad_kernel, (1,), tensor(), SIZE=4)
        launch_kernel(add_kernel, (1,), *first.args, **first.named)
    assert compiled == ["add_kernel"]
    with pytest.raises(ZeroDivisionError), compile_only():
        raise ZeroDivisionError
    launch_kernel(add_kernel, (1,), *first.args, **first.named)
    assert len(NotingLauncher.launches) == 1


def test_what_nobody_wrote_is_zero_in_compile_only() -> None:
    with compile_only():
        for made in (torch.empty(1 << 16), torch.empty_like(torch.ones(1 << 16, dtype=torch.int64))):
            assert not made.any()
