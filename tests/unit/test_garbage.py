"""The collector of cycles, switched off for a while."""

import gc

import pytest

from gapless.garbage import without_garbage_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_within_the_block_and_the_setting_comes_back(enabled: bool) -> None:
    def fails_within() -> None:
        with without_garbage_collection():
            assert not gc.isenabled()
            raise KeyError

    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(KeyError):
            fails_within()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
