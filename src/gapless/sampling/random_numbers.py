"""Counter-based random numbers: a function of (request seed, output position) and nothing else.

So a request draws the same numbers whatever runs beside it, on which row, at which depth and after a preemption. The
mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), in wrapping 64-bit integer arithmetic, which CPU and GPU do alike.
"""

import torch
from torch import Tensor

__all__ = ["uniform"]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # Logical: int64's >> repeats the sign.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one number in [0, 1) for each sample.

    Args:
        seeds: ``[n]``, int64.
        positions: ``[n]``, an integer dtype: output positions.

    Returns:
        ``[n]``, fp64, multiples of 2**-53.
    """
    # The seed is mixed first, so that neighbouring seeds do not give the same stream shifted by one.
    state = _mix(seeds + _GAMMA) + (positions.to(torch.int64) + 1) * _GAMMA
    return _shift_right(_mix(state), 11).to(torch.float64) * 2.0**-53
