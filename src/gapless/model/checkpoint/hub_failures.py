"""Why the hub's client failed, in one line with the remedy, and whether trying again may help.

The client raises its own errors, its HTTP library's, ``OSError`` and ``ValueError``, and wraps some of them. Pure
functions; the token in use is looked at only to say whether there is one.
"""

from gapless.errors import CheckpointError

__all__ = ["hub_failure", "may_pass", "reason_of"]

_PASSING_STATUSES = (408, 429, 500, 502, 503, 504)
# Classes of the client's HTTP library, which goes by different names in its versions.
_BROKEN_OFF = {"NetworkError", "ProtocolError", "TimeoutException"}
_NEVER_BEGUN = {"ConnectError", "ConnectTimeout", "ProxyError"}
_LOG_IN = "`hf auth login`, or HF_TOKEN"


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed in a moment. A hub that cannot be reached at all is not waited for."""
    cause = _first_cause(error)
    if (status := _status_of(cause)) is not None:
        return status in _PASSING_STATUSES
    classes = {kind.__name__ for kind in type(cause).__mro__}
    return (bool(classes & _BROKEN_OFF) and not classes & _NEVER_BEGUN) or _arrived_incomplete(cause)


def hub_failure(repository: str, revision: str | None, error: Exception) -> CheckpointError:
    """The error for whoever asked for the model.

    Args:
        repository: ``org/name``.
        revision: as asked for, if it was.
        error: of the client.
    """
    # Imported on first use: a local model must not pay for, or depend on, the hub client.
    from huggingface_hub import constants, errors

    name = repository if revision is None else f"{repository}@{revision}"
    what, hub, cache = f"model={name!r}", constants.ENDPOINT, constants.HF_HUB_CACHE
    cause = _first_cause(error)
    status = _status_of(cause)
    has_token = _has_token()
    if isinstance(cause, errors.GatedRepoError):
        who = "the account of the token has no access to it" if has_token else "no token was given"
        text = f"is gated, and {who}; accept its terms at {hub}/{repository} and log in ({_LOG_IN})"
    elif isinstance(cause, errors.RevisionNotFoundError):
        text = f"has no revision {revision!r}; give a branch, a tag or a commit of {hub}/{repository}"
    elif status == 401 and has_token:
        text = f"was not looked for: {hub} refuses the token; log in anew, or correct or remove HF_TOKEN ({_LOG_IN})"
    elif isinstance(cause, errors.RepositoryNotFoundError) or status == 401:
        token = "which the token may not read" if has_token else "which needs a token"
        text = f"is not at {hub}, or is private, {token}; check the name, or log in ({_LOG_IN})"
    elif status == 403:
        said = " ".join((getattr(cause, "server_message", None) or "no reason given").split())
        text = f"may not be read: {hub} says {said!r}; give the token that permission, or take another ({_LOG_IN})"
    elif status is not None:
        text = f"could not be taken from {hub} ({reason_of(cause)}); try again later, or give a local folder"
    elif isinstance(cause, errors.OfflineModeIsEnabled) or (
        constants.HF_HUB_OFFLINE and isinstance(error, errors.LocalEntryNotFoundError)
    ):
        text = f"is not complete in {cache}, and HF_HUB_OFFLINE keeps it from being downloaded; unset it once for that"
    elif isinstance(cause, OSError) and cause.errno is not None:
        text = f"could not be kept in {cache} ({cause.strerror}); make room there, or point HF_HOME elsewhere"
    elif isinstance(error, errors.LocalEntryNotFoundError) or not may_pass(cause):
        text = (
            f"is not complete in {cache}, and {hub} could not be asked ({reason_of(cause)}); "
            "check the connection and HF_ENDPOINT, or give a local folder"
        )
    else:
        text = f"did not arrive whole ({reason_of(cause)}); try again: files that did arrive are kept"
    return CheckpointError(f"{what} {text}")


def _has_token() -> bool:
    from huggingface_hub import get_token

    try:
        return get_token() is not None
    except OSError:  # the file that holds it cannot be read
        return False


def reason_of(error: Exception) -> str:
    """What went wrong, in a few words and without addresses, which may hold keys."""
    cause = _first_cause(error)
    if (status := _status_of(cause)) is not None:
        return f"the hub answered with status {status}"
    if _arrived_incomplete(cause):
        return "a file arrived with another size than it has there"
    text = str(cause).strip().split("\n", 1)[0]
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__


def _first_cause(error: Exception) -> Exception:
    """The error behind the client's "not in the cache either"; others are what they say."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause = error
    while isinstance(cause, LocalEntryNotFoundError) and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    return cause


def _status_of(error: Exception) -> int | None:
    """The status of an answer that was no success."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _arrived_incomplete(error: Exception) -> bool:
    return type(error) is OSError and "Consistency check failed" in str(error)
