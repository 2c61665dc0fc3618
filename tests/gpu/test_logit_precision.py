"""Logits on a CUDA device are as near to exact ones as those of transformers, or of plain torch, in the same dtype."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from transformers import LlamaConfig

from fixtures.decode_precision import check_decodes
from fixtures.logit_precision import FAMILY_CASES, check_family
from gapless.kernels.layer_ops import TritonOps
from gapless.kernels.paged_attention import TritonAttention
from gapless.kernels.tuned_table import TunedTable

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# Kernels are compiled for each dtype; what distinguishes families beside their windows is the same in both.
HALF_CASES = ("llama-3", "mistral-window", "qwen3-biases-upper-half-slides")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.bfloat16) for case in FAMILY_CASES), *((case, torch.float16) for case in HALF_CASES)],
)
def test_logits_of_each_family_with_and_without_graphs(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_family(case, dtype=dtype, device="cuda", folder=tmp_path, graphs=(True, False))


def test_decodes_through_the_products_that_were_tuned() -> None:
    """The shapes of Llama-3.1-8B, two layers of it, in steps of every width that a table may have tiles for."""
    table = TunedTable.for_device(torch.cuda.get_device_name())
    widths = {key.tokens for key in table.tiles if (key.out_features, key.in_features) == (28672, 4096)}
    if not widths:
        pytest.skip("no tiles for these shapes and this device: the library does them, as in the test above")
    assert widths >= {16, 64, 128}
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    )
    check_decodes(
        config,
        sizes=(1, 16, 33, 64, 100, 128),
        dtype=torch.bfloat16,
        device="cuda",
        ops=TritonOps.for_device(DEVICE),
        attention=TritonAttention.for_device(DEVICE),
    )
