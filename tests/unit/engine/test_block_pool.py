"""Who holds which block: counts always add up, eviction is least recently used, a prefix's tail goes first."""

import random

import pytest

from gapless.engine.block_pool import BlockPool
from gapless.engine.prefix_cache import CachedPrefix, PrefixCache


def _register(pool: BlockPool, block: int, tokens: bytes) -> None:
    pool.cache.add(CachedPrefix.start(b""), tokens, block)


def test_blocks_are_handed_out_once_and_the_reserved_one_never() -> None:
    pool = BlockPool(5, PrefixCache())
    taken = [pool.take() for _ in range(5)]

    assert sorted(taken) == [1, 2, 3, 4, 5]
    assert (pool.num_available, pool.num_in_use) == (0, 5)


def test_released_blocks_are_free_unless_they_are_cached() -> None:
    pool = BlockPool(4, PrefixCache())
    plain, cached = pool.take(), pool.take()
    _register(pool, cached, b"a")
    pool.release([plain, cached])

    assert (pool.num_free, pool.num_evictable, pool.num_in_use) == (3, 1, 0)
    assert pool.is_evictable(cached)
    assert not pool.is_evictable(plain)


def test_a_shared_block_lives_until_its_last_holder_leaves() -> None:
    pool = BlockPool(2, PrefixCache())
    block = pool.take()
    _register(pool, block, b"a")
    pool.share(block)
    pool.release([block])
    assert (pool.num_in_use, pool.references[block]) == (1, 1)
    pool.release([block])
    assert pool.is_evictable(block)
    pool.share(block)
    assert (pool.num_evictable, pool.references[block]) == (0, 1)


def test_free_blocks_go_first_then_the_least_recently_released() -> None:
    pool = BlockPool(4, PrefixCache())
    blocks = [pool.take() for _ in range(3)]
    for index, block in enumerate(blocks):
        _register(pool, block, bytes([index]))
    # A request releases its tail first.
    pool.release(reversed(blocks))

    assert pool.take() not in blocks, "the one free block"
    assert [pool.take() for _ in range(3)] == blocks[::-1], "the tail is evicted before the start of the prefix"
    assert len(pool.cache) == 0, "an evicted block is no longer found"


def test_using_a_cached_block_makes_it_recent() -> None:
    pool = BlockPool(3, PrefixCache())
    blocks = [pool.take() for _ in range(3)]
    for index, block in enumerate(blocks):
        _register(pool, block, bytes([index]))
    pool.release(blocks)
    pool.share(blocks[0])
    pool.release([blocks[0]])

    assert [pool.take() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_withdrawn_blocks_are_free_or_will_be() -> None:
    pool = BlockPool(3, PrefixCache())
    held, idle = pool.take(), pool.take()
    _register(pool, held, b"a")
    _register(pool, idle, b"b")
    pool.release([idle])
    pool.withdraw(idle)
    pool.withdraw(held)

    assert (pool.num_free, pool.num_evictable, pool.num_in_use) == (2, 0, 1)
    pool.release([held])
    assert pool.num_free == 3
    pool.withdraw(held)
    assert pool.num_free == 3, "a second time is nothing"


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(1, PrefixCache())
    block = pool.take()
    pool.release([block])
    with pytest.raises(AssertionError, match="released too often"):
        pool.release([block])


def test_c13_counts_add_up_over_random_operations() -> None:
    chance = random.Random(13)
    pool = BlockPool(16, PrefixCache())
    holders: list[list[int]] = []
    for number in range(5000):
        what = chance.choice(["take", "take", "share", "release", "release", "withdraw"])
        held = [block for blocks in holders for block in blocks]
        if what == "take" and pool.num_available:
            blocks = [pool.take() for _ in range(chance.randint(1, pool.num_available))]
            for block in blocks[: chance.randint(0, len(blocks))]:
                _register(pool, block, number.to_bytes(4, "little") + bytes([block]))
            holders.append(blocks)
        elif what == "share" and (known := [block for block in range(1, 17) if block in pool.cache]):
            block = chance.choice(known)
            pool.share(block)
            holders.append([block])
        elif what == "release" and holders:
            pool.release(reversed(holders.pop(chance.randrange(len(holders)))))
        elif what == "withdraw":
            pool.withdraw(chance.randint(1, 16))
        held = [block for blocks in holders for block in blocks]
        assert pool.references[1:] == [held.count(block) for block in range(1, 17)]
        assert pool.num_in_use == len(set(held))
        assert pool.num_free + pool.num_evictable + len(set(held)) == 16
    pool.release([block for blocks in holders for block in blocks])
    assert pool.num_available == 16
