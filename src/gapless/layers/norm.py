"""RMS normalisation (Zhang and Sennrich, arXiv:1910.07467), with the mean square taken in fp32 whatever the dtype."""

from torch import Tensor
from torch.nn import functional as F

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, in the dtype of ``x``.

    Args:
        x: ``[..., size]``, any floating dtype. Squares of fp16 values above 255 would overflow, so torch's kernel
            computes in fp32 (``test_c51_fp16_overflow`` holds it to that).
        weight: ``[..., size]``, the dtype of ``x``; leading axes are broadcast, one weight for each head for example.
        eps: added to the mean square.
    """
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, weight.shape[-1:], None, eps) * weight
