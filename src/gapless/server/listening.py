"""The socket that a server listens on: :func:`open_listener`.

It is bound and listening before anything else is done, so that an address in use is told before a model is loaded, and
two servers that start together cannot both believe to have it. Called once, by the main thread.
"""

import contextlib
import errno
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gapless.errors import ConfigError, shown
from gapless.server.settings import ServerSettings

__all__ = ["allowed_connections", "open_listener"]

_BACKLOG: Final = 2048
_UNIX_MODE: Final = 0o660
# Seconds after which the kernel gives up a peer that acknowledges or takes nothing.
_PEER_TIMEOUT_S: Final = 120
# Files that are no connections: the engine's sockets, libraries, the log.
_OTHER_FILES: Final = 256


@contextlib.contextmanager
def open_listener(settings: ServerSettings) -> Iterator[socket.socket]:
    """Listen as the settings say; a Unix socket's file is removed at the end.

    Raises:
        ConfigError: the address is in use, not ours, or unknown.
    """
    if settings.uds is not None:
        path = Path(settings.uds)
        listener = _unix_listener(path)
        try:
            with listener:
                yield listener
        finally:
            path.unlink(missing_ok=True)
        return
    with _tcp_listener(settings.host, settings.port) as listener:
        yield listener


def allowed_connections(wanted: int) -> int:
    """Raise the limit of open files as far as the system lets us; return how many connections fit under it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(min(wanted, soft - _OTHER_FILES), 1)


def _tcp_listener(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host={shown(host)} is no address: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Connections inherit it: a reader that takes nothing does not hold its connection for ever.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PEER_TIMEOUT_S * 1000)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(f"port={port} on {host}", error) from error
    return listener


def _unix_listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _is_answered(path):
            path.unlink()  # a server that was killed has left it
        before = os.umask(0o777 & ~_UNIX_MODE)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refused(f"uds={shown(str(path))}", error) from error
    return listener


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _refused(what: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{what} is in use; choose another one, or end what uses it")
    return ConfigError(f"{what} cannot be listened on: {error.strerror or error}")
