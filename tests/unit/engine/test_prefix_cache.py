"""The prefix cache: a block is found only under its own tokens, after its own parent, with its own salt."""

import pytest

from gapless.engine import prefix_cache
from gapless.engine.prefix_cache import CachedPrefix, PrefixCache


def _chain(cache: PrefixCache, salt: bytes, *tokens: bytes) -> list[int]:
    """The blocks found for ``tokens``, from the start."""
    prefix, blocks = CachedPrefix.start(salt), []
    for block_tokens in tokens:
        found = cache.find(prefix, block_tokens)
        if found is None:
            break
        prefix, block = found
        blocks.append(block)
    return blocks


def _add_chain(cache: PrefixCache, salt: bytes, **blocks: int) -> None:
    prefix = CachedPrefix.start(salt)
    for tokens, block in blocks.items():
        prefix = cache.add(prefix, tokens.encode(), block)


@pytest.fixture(params=["blake2b", "constant"])
def cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefixCache:
    if request.param == "constant":
        monkeypatch.setattr(prefix_cache, "block_key", lambda parent, tokens: b"the same for all")
    return PrefixCache()


def test_a_chain_is_found_as_far_as_its_tokens_go() -> None:
    cache = PrefixCache()
    _add_chain(cache, b"", a=1, b=2, c=3)

    assert _chain(cache, b"", b"a", b"b", b"c") == [1, 2, 3]
    assert _chain(cache, b"", b"a", b"b", b"x", b"c") == [1, 2]
    assert _chain(cache, b"", b"b") == []


def test_c11_the_same_tokens_after_other_ones_are_another_block() -> None:
    cache = PrefixCache()
    _add_chain(cache, b"", a=1, z=2)
    _add_chain(cache, b"", b=3, z=4)

    assert _chain(cache, b"", b"a", b"z") == [1, 2]
    assert _chain(cache, b"", b"b", b"z") == [3, 4]


def test_c11_a_salt_keeps_prefixes_apart() -> None:
    cache = PrefixCache()
    _add_chain(cache, b"mine", a=1)

    assert _chain(cache, b"", b"a") == []
    assert _chain(cache, b"yours", b"a") == []
    assert _chain(cache, b"mine", b"a") == [1]


def test_c11_colliding_keys_lend_out_nothing_wrong(cache: PrefixCache) -> None:
    right = {b"a": 1, b"b": 2, b"c": 3}
    for tokens, block in right.items():
        cache.add(CachedPrefix.start(b""), tokens, block)
        for asked in (b"a", b"b", b"c", b"d"):
            found = cache.find(CachedPrefix.start(b""), asked)
            assert found is None or found[1] == right[asked]
        assert cache.find(CachedPrefix.start(b""), tokens) is not None
    assert len(cache) == sum(block in cache for block in right.values())


def test_c11_a_parent_that_was_replaced_takes_its_children_along(cache: PrefixCache) -> None:
    _add_chain(cache, b"", a=1, b=2)
    cache.forget(1)
    _add_chain(cache, b"", a=5)

    # Block 2 may hold KV that was computed after another block; it is not offered under the new entry.
    assert _chain(cache, b"", b"a", b"b") == [5]


def test_an_equal_entry_stays_and_its_prefix_is_joined() -> None:
    cache = PrefixCache()
    first = cache.add(CachedPrefix.start(b""), b"a", 1)
    second = cache.add(CachedPrefix.start(b""), b"a", 7)

    assert first == second
    assert 7 not in cache
    assert cache.add(second, b"b", 8).num_blocks == 2
    assert _chain(cache, b"", b"a", b"b") == [1, 8]


def test_forgetting_is_idempotent(cache: PrefixCache) -> None:
    _add_chain(cache, b"", a=1)
    cache.forget(1)
    cache.forget(1)
    cache.forget(9)
    assert len(cache) == 0
    assert _chain(cache, b"", b"a") == []
