"""Every launch of a kernel here, cheap from the second one on, and compilation ahead of launches.

The idea: a step that is launched kernel by kernel has some hundred launches, and the device must not wait for them.
On the way from a call to the compiled kernel Triton makes texts and dictionaries and looks them up, every time. What
decides is less: the *variant*, which is all that the arguments are to the compiler. :func:`launch_kernel` keeps a
kernel's variants under a key that says as much as Triton's own, and starts a known one by its compiled launcher, with
the addresses that the key was made of. Triton itself launches what comes first, what is interpreted, what is watched by
hooks (profilers), and calls of another form than those here: plain arguments by position, then constants and launch
options by name.

Kernels are compiled by whoever launches them first, one after the other. :func:`compile_only` does it for all launches
of a block side by side.

State: the variants that were launched, as long as the process lives; Triton keeps them too. Any thread may launch. What
Triton looks at besides must not change once a variant is known: globals that a kernel reads, settings in the
environment. Nor does anybody look again whether a tensor is on the device.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from operator import and_, attrgetter
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver, jit

__all__ = ["compile_only", "launch_kernel"]

_TRITON = "3.6."
"""Versions of Triton whose inner functions are those used here; with others Triton itself does everything."""

Key: TypeAlias = tuple[object, ...]
Read: TypeAlias = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Key | None, tuple[Any, ...]]]
"""From a call's plain and named arguments to the key of its variant, ``None`` for a call of another form, and to what
the launcher takes for the plain ones."""


class _Variant:
    """A compiled kernel on its device, without the arguments.

    Attributes:
        launch: the launcher that Triton compiled for the signature.
        head: what it takes between the stream and the arguments: the kernel, attributes and no hooks.
        tail: constants, which it takes after the arguments and does not look at.
    """

    __slots__ = ("head", "launch", "tail")

    def __init__(self, compiled: CompiledKernel, tail: tuple[object, ...]) -> None:
        run = compiled.run
        self.launch = run.launch
        attributes = (run.launch_cooperative_grid, run.launch_pdl)
        self.head = (compiled.function, *attributes, None, None, compiled.packed_metadata, None, None, None)
        self.tail = tail


class _Known:
    """The variants of one kernel on one device; holds the kernel, whose identity is the key of this entry."""

    __slots__ = ("kernel", "read", "variants")

    def __init__(self, kernel: Any, read: Read) -> None:
        self.kernel = kernel
        self.read = read
        self.variants: dict[Key, _Variant] = {}

    def add(self, key: Key, compiled: Any, named: dict[str, Any]) -> None:
        """Keep a variant that has just been launched, if this module can launch it."""
        if not isinstance(compiled, CompiledKernel) or not isinstance(run := compiled.run, CudaLauncher):
            return
        if not (run.global_scratch_size or run.profile_scratch_size):
            constants = (param for param in self.kernel.params if param.is_constexpr)
            self.variants[key] = _Variant(compiled, tuple(named.get(p.name, p.default) for p in constants))


def _reader(kernel: Any, device: int, args: tuple[Any, ...]) -> Read:
    """Make the function that reads calls of ``kernel``; the first run of tensors in ``args`` is one in later calls too.

    To the compiler such a tensor is its dtype and whether its address is a multiple of 16, unless the kernel says that
    this does not matter. Any other argument is what Triton's function for it says, which takes longer.
    """
    params = [param for param in kernel.params if not param.is_constexpr]
    usual = len(args) == len(params) and params == kernel.params[: len(params)]
    if not triton.__version__.startswith(_TRITON) or not usual or any(param.annotation for param in params):
        return lambda args, named: (None, ())
    count, kind = len(args), jit.native_specialize_impl
    first = next((i for i, arg in enumerate(args) if isinstance(arg, Tensor)), count)
    last = next((i for i in range(first, count) if not isinstance(args[i], Tensor)), count)
    others = params[:first] + params[last:]
    backends, by_value = [kernel.device_caches[device][3]] * len(others), [not p.do_not_specialize for p in others]
    constant, by_alignment = [False] * len(others), [not p.do_not_specialize_on_alignment for p in others]
    masks = [0 if p.do_not_specialize or p.do_not_specialize_on_alignment else 15 for p in params[first:last]]
    address_of, dtype_of = Tensor.data_ptr, attrgetter("dtype")

    def read(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Key | None, tuple[Any, ...]]:
        tensors, before, after = args[first:last], args[:first], args[last:]
        try:
            addresses = [*map(address_of, tensors)]
            kinds = map(kind, backends, (*before, *after), constant, by_value, by_alignment)
            key = (*map(dtype_of, tensors), *kinds, *named, *named.values())
        except TypeError:  # not the tensors that there were at first
            return None, ()
        if any(map(and_, addresses, masks)):
            key = (*key, tuple(map(bool, map(and_, addresses, masks))))
        return (key if len(args) == count else None), (*before, *addresses, *after)

    return read


_known: dict[tuple[int, int], _Known] = {}
_compiling: ContextVar[set[tuple[int, Key]] | None] = ContextVar("gapless_compiling", default=None)


def launch_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """``kernel[grid](*args, **kwargs)``, on the current device and stream.

    Args:
        kernel: a function of Triton or Gluon.
        grid: how many programs, by axis.
        args: its plain arguments.
        kwargs: its constants, and launch options.
    """
    if not isinstance(kernel, jit.JITFunction):
        kernel[grid](*args, **kwargs)
        return
    device = driver.active.get_current_device()
    known = _known.get((id(kernel), device))
    if known is None:
        known = _known.setdefault((id(kernel), device), _Known(kernel, _reader(kernel, device, args)))
    key, plain = known.read(args, kwargs)
    if _compiling.get() is not None:
        _compile(known, key, args, kwargs)
        return
    variant = None if key is None or _is_watched(kernel) else known.variants.get(key)
    if variant is None:
        compiled = kernel[grid](*args, **kwargs)
        if key is not None:
            known.add(key, compiled, kwargs)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    variant.launch(x, y, z, stream, *variant.head, *plain, *variant.tail)


def _is_watched(kernel: Any) -> bool:
    """Whether somebody hears of launches, or wants kernels that check themselves."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # A chain of hooks is always there, and mostly empty.
    return bool(
        getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or kernel.pre_run_hooks or runtime.debug
    )


@contextmanager
def compile_only() -> Iterator[None]:
    """Within the block this thread's launches are compiled, side by side, and not run; its end waits for them.

    They are ready to be launched then, on the current device.

    Operations of torch run as always, on memory that nobody wrote: it is zeroed, so that an index in it is one. With
    another Triton than this module was written for, or an interpreted one, kernels run as well.

    Raises:
        Exception: what the first kernel that cannot be compiled raised, at the end of the block.
    """
    if not triton.__version__.startswith(_TRITON) or knobs.runtime.interpret:
        yield
        return
    active = driver.active
    num_threads, device = len(os.sched_getaffinity(0)), active.get_current_device()
    with ThreadPoolExecutor(num_threads, initializer=active.set_current_device, initargs=(device,)) as pool:
        # Errors are raised below: one of its own would leave it active.
        with triton.AsyncCompileMode(pool, ignore_errors=True) as mode, _ZeroedMemory():
            token = _compiling.set(set())
            try:
                yield
            finally:
                _compiling.reset(token)
        compiled = [future.result() for future in mode.raw_futures]
        # Launchers are compiled too, from C. Not kept here: modules of one name that threads load are mixed up.
        for _ in pool.map(lambda kernel: active.launcher_cls(kernel.src, kernel.metadata), compiled):
            pass
    for kernel in compiled:
        kernel._init_handles()


def _compile(known: _Known, key: Key | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hand a variant to the compiling threads, unless they have it."""
    seen = _compiling.get()
    assert seen is not None
    if key is not None:
        if key in known.variants or (id(known), key) in seen:
            return
        seen.add((id(known), key))
    known.kernel.run(*args, grid=None, warmup=True, **kwargs)


class _ZeroedMemory(TorchFunctionMode):
    """New tensors of torch are zeros, where they would be whatever was there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        return _ZEROED.get(func, func)(*args, **(kwargs or {}))


_ZEROED: dict[Callable[..., Any], Callable[..., Any]] = {torch.empty: torch.zeros, torch.empty_like: torch.zeros_like}
