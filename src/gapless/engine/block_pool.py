"""Who holds which KV block: :class:`BlockPool`, reference counts over the paged cache.

A block is *in use* (someone holds a reference), *evictable* (nobody does, but the prefix cache knows its tokens) or
*free*. ``free + evictable + in use == total`` always. Evictable blocks are taken least recently used first; a request
drops its references tail first, so the start of a prefix, which others may share, lives longest.

Compute-stream order is the fence: a block may be handed on as soon as its holder's last step is enqueued, because
the new holder's step runs later. Block 0 is reserved for padding and never handed out. Engine thread only.
"""

from collections import OrderedDict
from collections.abc import Iterable

from gapless.engine.prefix_cache import PrefixCache

__all__ = ["BlockPool"]


class BlockPool:
    """``num_blocks`` blocks with the ids 1 to ``num_blocks``."""

    def __init__(self, num_blocks: int, cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.cache = cache
        self.references = [0] * (num_blocks + 1)
        self._free = list(range(num_blocks, 0, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Blocks that hold cached tokens and no reference."""
        return len(self._evictable)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_in_use(self) -> int:
        """Blocks with a reference."""
        return self.num_blocks - self.num_available

    def is_evictable(self, block: int) -> bool:
        """Whether a cached block has no reference."""
        return block in self._evictable

    def take(self) -> int:
        """Hand out a block with one reference; the caller has checked ``num_available``."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self.cache.forget(block)
        assert self.references[block] == 0
        self.references[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a cached block."""
        if self.references[block] == 0:
            del self._evictable[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block, in the order given (tail first for a request)."""
        for block in blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} released too often"
            if self.references[block] == 0:
                if block in self.cache:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def withdraw(self, block: int) -> None:
        """Take a block's tokens out of the prefix cache, since they cannot be trusted."""
        self.cache.forget(block)
        if block in self._evictable:
            del self._evictable[block]
            self._free.append(block)
