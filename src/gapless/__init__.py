"""gapless: an LLM inference engine in which the accelerator never waits for the host.

``LLM`` and ``AsyncLLM`` are loaded when they are first used: ``import gapless`` alone, and with it ``gapless --help``,
needs neither torch nor transformers.
"""

from typing import TYPE_CHECKING

from gapless import errors
from gapless.config import EngineConfig
from gapless.outputs import CompletionOutput, RequestMetrics, RequestOutput
from gapless.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gapless.async_llm import AsyncLLM
    from gapless.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "errors",
]

__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> object:
    if name == "LLM":
        from gapless.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from gapless.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
