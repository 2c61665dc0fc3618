"""Which KV blocks hold which tokens: :class:`PrefixCache`, an index over full blocks.

A block's key chains the key of its parent with its own tokens (BLAKE2b, so that equal keys mean equal prefixes), from
a root made of the request's salt. A hit is checked all the same: the entry must hold the same tokens and hang on the
very entry that was hit before it. So even colliding keys cannot lend out another request's KV.

A placeholder never enters a key: only tokens the host knows are registered. Owned by the block pool; engine thread.
"""

import hashlib
from dataclasses import dataclass, replace
from itertools import count

__all__ = ["CachedPrefix", "PrefixCache"]


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of a block with ``tokens`` (int32, native order) after the block with key ``parent``."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """How far a request's blocks are keyed: their number, the last key, and the index entry it stands for."""

    num_blocks: int
    key: bytes
    entry: int

    @staticmethod
    def start(salt: bytes) -> "CachedPrefix":
        """The empty prefix of a request with ``salt``."""
        return CachedPrefix(0, hashlib.blake2b(salt, digest_size=16, person=b"gapless-root").digest(), 0)


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    parent: int
    tokens: bytes
    block: int
    key: bytes


class PrefixCache:
    """Entries by key and by block."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, prefix: CachedPrefix, tokens: bytes) -> tuple[CachedPrefix, int] | None:
        """Return the block holding ``tokens`` right after ``prefix``, and the longer prefix."""
        key = block_key(prefix.key, tokens)
        entry = self._by_key.get(key)
        if entry is None or entry.tokens != tokens or entry.parent != prefix.entry:
            return None
        return CachedPrefix(prefix.num_blocks + 1, key, entry.number), entry.block

    def add(self, prefix: CachedPrefix, tokens: bytes, block: int) -> CachedPrefix:
        """Register ``block`` as holding ``tokens`` after ``prefix``; an equal entry that exists already stays."""
        found = self.find(prefix, tokens)
        if found is not None:
            return found[0]
        key = block_key(prefix.key, tokens)
        old = self._by_key.get(key)
        if old is not None:
            del self._by_block[old.block]
        entry = _Entry(next(self._numbers), prefix.entry, tokens, block, key)
        self._by_key[key] = self._by_block[block] = entry
        return replace(prefix, num_blocks=prefix.num_blocks + 1, key=key, entry=entry.number)

    def forget(self, block: int) -> None:
        """Drop the entry of ``block``, if it has one."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_key[entry.key]
