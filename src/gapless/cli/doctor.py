"""``gapless doctor``: what gapless finds on this machine, and whether it works.

The last check is a real one: a small model with random weights answers on each device, with the kernels that device
uses.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import psutil
import torch

import gapless
from gapless.cli.console import reported
from gapless.cli.options import VerboseOption
from gapless.errors import GaplessError
from gapless.model.checkpoint import open_checkpoint
from gapless.model.checkpoint.presets import PRESET_NAMES
from gapless.sampling_params import SamplingParams

__all__ = ["doctor"]

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "gguf")
_GIB = 2**30


class BrokenInstallationError(GaplessError):
    """A device is there and does not work."""


def doctor(*, verbose: VerboseOption = False) -> None:
    """Show versions, devices, memory, kernels and models, and try each device."""
    with reported(verbose=verbose, quiet=True):
        for name, value in _findings():
            print(f"{name:<14}{value}", flush=True)
        broken = [device for device in _devices() if not _try_device(device)]
        if broken:
            raise BrokenInstallationError(f"{' and '.join(broken)} cannot be used: see above")


def _findings() -> Iterator[tuple[str, str]]:
    yield "gapless", f"{gapless.__version__} on Python {platform.python_version()}, {platform.platform()}"
    yield "packages", ", ".join(f"{name} {_version_of(name)}" for name in _PACKAGES)
    yield "CPU", f"{_cpu_name()}, {_usable_cores()} cores to use, {torch.get_num_threads()} torch threads"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    yield "CUDA", _cuda()
    for index in range(torch.cuda.device_count()):
        yield f"GPU {index}", _gpu(index)
    yield "attention", "Triton kernels on CUDA, torch operations on CPUs"
    yield "smollm2", _smollm2()
    yield "presets", f"{', '.join(PRESET_NAMES)} (with --load-format dummy)"


def _devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _try_device(device: str) -> bool:
    """Generate a few tokens; print how it went."""
    began_s = time.perf_counter()
    try:
        with gapless.LLM(
            "tiny-llama", load_format="dummy", device=device, kv_cache_memory_bytes=1 << 22, max_model_len=128
        ) as llm:
            outputs = llm.generate(["a", "bc"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    except Exception as error:  # whatever it is, this device does not work
        print(f"{'try ' + device:<14}FAILED: {type(error).__name__}: {' '.join(str(error).split())}")
        return False
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"{'try ' + device:<14}works: {tokens} tokens from a small random model, {time.perf_counter() - began_s:.1f} s"
    )
    return True


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else psutil.cpu_count() or 1


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _cuda() -> str:
    if torch.version.cuda is None:
        return "none: this torch was built without it"
    built = f"torch was built for {torch.version.cuda}"
    if not torch.cuda.is_available():
        return f"no usable device ({built}): check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return f"driver {_driver()}, {built}"


def _driver() -> str:
    return _first_of(
        lambda: open("/proc/driver/nvidia/version", encoding="utf-8").readline().split("  ")[1].strip(),
        lambda: "of unknown version",
    )


def _first_of(*attempts: Callable[[], str]) -> str:
    for attempt in attempts[:-1]:
        try:
            return attempt()
        except (OSError, IndexError):
            continue
    return attempts[-1]()


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB"
    )


def _smollm2() -> str:
    try:
        open_checkpoint("smollm2")
    except GaplessError as error:
        return f"not found: {error}"
    return "installed (--model smollm2)"
