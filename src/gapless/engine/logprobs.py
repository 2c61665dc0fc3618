"""Log-probs on their way from a collected step to a request: :class:`TokenLogprobs`. Engine thread only."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gapless.pipeline.logprobs import HostLogprobs

__all__ = ["FullLogprobs", "TokenLogprobs", "token_logprobs_of"]


class TokenLogprobs(NamedTuple):
    """A token's log-prob and rank (from 1), and the most likely tokens at its place, in falling order."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]

    def cut(self, num_top: int) -> "TokenLogprobs":
        """The same with ``num_top`` top tokens; the step may have made more for a neighbour."""
        if len(self.top_ids) == num_top:
            return self
        return self._replace(top_ids=self.top_ids[:num_top], top_logprobs=self.top_logprobs[:num_top])


class FullLogprobs(NamedTuple):
    """The log-probs of the whole vocabulary at a token's place, ``[vocab_size]``; put in order by who reads them."""

    values: NDArray[np.float32]


def token_logprobs_of(block: HostLogprobs) -> list[TokenLogprobs]:
    """A block's ratings one by one."""
    rows = zip(block.chosen.tolist(), block.ranks.tolist(), block.top_ids.tolist(), block.top.tolist(), strict=True)
    return [TokenLogprobs(*row) for row in rows]
