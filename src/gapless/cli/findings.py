"""What ``gapless doctor`` looks at, in two functions: :func:`findings` and :func:`try_device`."""

import os
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil
import torch

import gapless
from gapless.errors import GaplessError
from gapless.llm import LLM
from gapless.model.checkpoint import open_checkpoint
from gapless.model.checkpoint.presets import PRESET_NAMES
from gapless.sampling_params import SamplingParams

__all__ = ["Finding", "findings", "try_device", "usable_devices"]

Device = Literal["cpu", "cuda"]

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "gguf")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report; ``works`` is false where something that should work does not."""

    name: str
    value: str
    works: bool = True


def findings() -> Iterator[Finding]:
    """Versions, devices, memory, kernels and models."""
    yield Finding(
        name="gapless", value=f"{gapless.__version__}, Python {platform.python_version()}, {platform.platform()}"
    )
    yield Finding(name="packages", value=", ".join(f"{name} {_version_of(name)}" for name in _PACKAGES))
    yield Finding(
        name="CPU", value=f"{_cpu_name()}, {_usable_cores()} cores to use, {torch.get_num_threads()} torch threads"
    )
    memory = psutil.virtual_memory()
    yield Finding(name="memory", value=f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB")
    yield Finding(name="CUDA", value=_cuda())
    for index in range(torch.cuda.device_count()):
        yield Finding(name=f"GPU {index}", value=_gpu(index))
    yield Finding(name="attention", value=_attention())
    yield Finding(name="smollm2", value=_smollm2())
    yield Finding(name="presets", value=f"{', '.join(PRESET_NAMES)} (with --load-format dummy)")


def usable_devices() -> list[Device]:
    """The devices to try."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def try_device(device: Device) -> Finding:
    """Generate a few tokens on a device, with a small random model and the kernels of that device."""
    began_s = time.perf_counter()
    try:
        with LLM(
            "tiny-llama", load_format="dummy", device=device, kv_cache_memory_bytes=1 << 22, max_model_len=128
        ) as llm:
            outputs = llm.generate(["a", "bc"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    except Exception as error:  # whatever it is, this device does not work
        why = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(name=f"try {device}", value=why, works=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    took_s = time.perf_counter() - began_s
    return Finding(name=f"try {device}", value=f"works: {tokens} tokens of a small random model in {took_s:.1f} s")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cuda() -> str:
    if torch.version.cuda is None:
        return "none: this torch was built without it"
    built = f"torch was built for {torch.version.cuda}"
    if not torch.cuda.is_available():
        return f"no usable device ({built}): check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return f"driver {_driver()}, {built}"


def _driver() -> str:
    try:
        found = re.search(r"\s(\d+\.[\d.]+)\s", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else "of unknown version"


def _gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return (
        f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{free / _GIB:.1f} GiB free of {total / _GIB:.1f} GiB"
    )


def _attention() -> str:
    if not torch.cuda.is_available():
        return "torch operations (CPU)"
    if _version_of("triton") == "not installed":
        return "torch operations (CPU); Triton is missing, and CUDA needs it: pip install triton"
    return "Triton kernels (CUDA), torch operations (CPU)"


def _smollm2() -> str:
    try:
        open_checkpoint("smollm2")
    except GaplessError as error:
        return f"not found: {error}"
    return "installed (--model smollm2)"
