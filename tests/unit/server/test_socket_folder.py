"""Nobody but the user who runs the server reaches the sockets between its two processes."""

import asyncio
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless.server.engine_link import EngineLink
from gapless.server.lifecycle import SocketFolder


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    """An environment in which everybody may do everything with a new file."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_of_the_sockets_is_its_owners_alone() -> None:
    folder = SocketFolder()
    assert mode_of(folder.path) == 0o700
    assert folder.path.stat().st_uid == os.getuid()
    folder.remove()
    assert not folder.path.exists()


def test_the_link_to_the_engine_makes_its_sockets_in_such_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def everything() -> None:
        link = EngineLink()
        [folder] = tmp_path.iterdir()
        assert mode_of(folder) == 0o700
        news = Path(link.news_address.removeprefix("ipc://"))
        assert news.parent == folder
        assert news.is_socket()
        await link.close()
        assert not folder.exists()

    asyncio.run(everything())
