"""A whole engine's logits on the CPU are as near to exact ones as those of transformers in the same dtype."""

from pathlib import Path

import pytest
import torch

from fixtures.logit_precision import FAMILY_CASES, Loss, check_family, check_loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FAMILY_CASES)
def test_logits_of_each_family(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_family(case, dtype=dtype, device="cpu", folder=tmp_path)


@pytest.mark.parametrize(
    "ours",
    [Loss(rms=0.016, largest=0.1), Loss(rms=0.01, largest=0.21), Loss(rms=float("nan"), largest=0.1)],
)
def test_more_loss_than_the_bounds_allow_is_noticed(ours: Loss) -> None:
    theirs = Loss(rms=0.01, largest=0.1)
    check_loss(Loss(rms=0.0149, largest=0.199), theirs)
    with pytest.raises(AssertionError, match="beside"):
        check_loss(ours, theirs)
