"""API keys and host names: who may ask, decided before the app sees a request.

Only digests of keys are kept. Every known key is compared, in constant time, whichever matches. A key selects a salt
of the prefix cache as well: clients with different keys share no cached prompts, so that none can find out by timing
what another has asked. Immutable; any thread may use it.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

__all__ = ["Headers", "KeyRing", "host_of"]

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
"""As ASGI has them: lower-case names."""

_SCHEME: Final = b"bearer"


class KeyRing:
    """The keys that are accepted; without any, everybody is.

    Args:
        keys: in clear.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)

    def salt_for(self, headers: Headers) -> bytes | None:
        """The prefix cache's salt for whoever sent the headers; ``None`` if they may not ask.

        Exactly one ``Authorization`` header is accepted: where there are two, a proxy may have checked the other.
        """
        if not self._digests:
            return b""
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, token = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(token).digest()
        found = None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = known
        if found is None or scheme.lower() != _SCHEME:
            return None
        return hashlib.blake2b(found, digest_size=16, person=b"gapless-salt").digest()


def host_of(headers: Headers) -> str | None:
    """The ``Host`` header in lower case, without its port; ``None`` if there is not exactly one."""
    values = [value for name, value in headers if name == b"host"]
    if len(values) != 1:
        return None
    host = values[0].decode("latin-1").lower()
    name, separator, port = host.rpartition(":")
    return name if separator and port.isdigit() else host
