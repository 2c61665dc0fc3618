"""Programmatic dependent launch: a kernel may be made ready while the one before it on the stream still runs.

The idea: between two dependent kernels the device is otherwise empty for a few microseconds, which is as long as the
small kernels of a decode step take. A kernel launched this way starts early, reads what was finished long ago (weights,
tables), and calls ``gdc_wait`` before it touches anything that an earlier kernel of the step writes; right after that
``gdc_launch_dependents`` lets the next one start. The rule that makes chains safe: *every* kernel launched this way
waits, in at least one program, so each ends after the one before it. Captured graphs keep the property. No state.
"""

from typing import Any

import torch

__all__ = ["dependent_launch_options", "has_dependent_launch"]


def has_dependent_launch(device: torch.device) -> bool:
    """Whether the device can (compute capability 9.0 and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch_options(*, on: bool) -> dict[str, Any]:
    """Launch options for a kernel; none when off, since Triton's interpreter knows no launch attributes."""
    return {"launch_pdl": True} if on else {}
