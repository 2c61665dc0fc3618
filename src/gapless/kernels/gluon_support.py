"""Where kernels in Gluon can be compiled and run; their modules are imported only there.

The idea: Gluon, Triton's lower language, says what Triton cannot (who loads, who multiplies, what is on its way across
a wait) but is not yet a stable part of it, and what these kernels say is said in Hopper's instructions. Everything that
they do, a Triton kernel does as well, elsewhere and with other versions. No state.
"""

import torch
import triton

__all__ = ["can_run_gluon"]

_GLUON_TRITON = "3.6."
"""Versions of Triton for which the kernels in Gluon were written and with which they have been run."""


def can_run_gluon(device: torch.device) -> bool:
    """Whether ``streamed_products`` and ``prefill_attention`` work on a CUDA device."""
    return torch.cuda.get_device_capability(device) == (9, 0) and triton.__version__.startswith(_GLUON_TRITON)
