"""What plain torch promises at the edges of sampling, in small vocabularies and in a real one."""

import pytest

from gapless.sampling.drawing import draw_tokens
from gapless.sampling.sampler import largest_logits
from unit.kernels.draw_edges import check_draws


@pytest.mark.parametrize("vocab_size", [203, 4096, 50_257])
def test_plain_torch_at_the_edges(vocab_size: int) -> None:
    check_draws(draw_tokens, largest_logits, vocab_size=vocab_size, device="cpu")
