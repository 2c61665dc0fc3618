"""A model of the hub as a local folder: :func:`fetch`.

The small files come first. They say whether gapless has such a model, so that one it does not have is refused before
its gigabytes are asked for. Then come those weights that :mod:`.safetensors_files` would read, and nothing else: no
pickles, no copies for other programs, and never code. What is in the client's cache already is not asked for again.

The hub's client does the work: cache, locks, tokens and its environment variables are its own. Added are a second try
where it makes none, progress, an end by Ctrl-C, and errors that say what to do. Any thread may call this; the client's
threads have ended when it returns.
"""

import glob
import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rich import filesize

from gapless.errors import CheckpointError, UnsupportedModelError
from gapless.model.checkpoint.base import LoadFormat
from gapless.model.checkpoint.download_bar import watched
from gapless.model.checkpoint.folder import open_folder
from gapless.model.checkpoint.hub_failures import hub_failure, may_pass, reason_of
from gapless.model.checkpoint.progress import Progress
from gapless.model.checkpoint.safetensors_files import INDEX_NAME, PICKLE_SUFFIXES, SINGLE_NAME, indexed_files

__all__ = ["HubName", "fetch"]

logger = logging.getLogger("gapless")

_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(\w[\w./-]{0,254}))?", re.ASCII)
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    INDEX_NAME,
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "spiece.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# Weights in a vendor's own layout, and parts that are nothing without another model.
_OTHER_WEIGHTS = ("consolidated", "adapter_")
_TRIES = 2
_PAUSE_S = 1.0
_TELL_INTERVAL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """``org/name``, perhaps with the branch, tag or commit that is meant: ``org/name@revision``."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a name; ``None`` if it is of another form."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text or "--" in match[1] or match[1].endswith((".git", ".", "-")):
            return None
        return cls(repository=match[1], revision=match[2])

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def fetch(name: HubName, load_format: LoadFormat, progress: Progress) -> Path:
    """Bring a model's files into the hub client's cache and return their folder there.

    Args:
        name: of the model.
        load_format: ``dummy`` needs no weights.
        progress: told about the stages ``find model`` and, if weights have to come, ``download``; see
            :func:`~gapless.model.checkpoint.download_bar.watched` for who sees the bytes.

    Raises:
        CheckpointError: there is no such model, it may not be read, or it did not arrive.
        UnsupportedModelError: it is no model for gapless.
    """
    progress.stage("find model")
    transfer = _Transfer(name)
    folder = transfer.run(name.revision, _SMALL_FILES, lambda _: None)
    if not (folder / "config.json").is_file():
        raise _without(name, "config.json", _sizes_by_path(name, folder.name))
    if load_format == "auto":
        open_folder(folder, "dummy")
        _fetch_weights(name, folder, transfer, progress)
    return folder


def _fetch_weights(name: HubName, folder: Path, transfer: "_Transfer", progress: Progress) -> None:
    """Bring the weights beside the small files, unless they are there."""
    index = folder / INDEX_NAME
    files = indexed_files(index) if index.is_file() else [SINGLE_NAME]
    if all((folder / file).is_file() for file in files):
        return
    try:
        sizes = _sizes_by_path(name, folder.name)
    except CheckpointError:
        # Out of reach. One file under a name of its own may be all that there is; what is read is checked anyway.
        if not index.is_file() and any(folder.glob("*.safetensors")):
            return
        raise
    if not index.is_file():
        files = [_single_file(name, sizes)]
    if absent := [file for file in files if file not in sizes]:
        raise CheckpointError(
            f"model={str(name)!r}: {INDEX_NAME} names {absent[0]!r}, which the repository does not hold"
        )
    if all((folder / file).is_file() for file in files):
        return
    progress.stage("download")
    total = sum(sizes[file] for file in files)
    here = sum(sizes[file] for file in files if (folder / file).is_file())
    logger.info("%s: %s of weights to come", name, filesize.decimal(total - here))
    patterns = [glob.escape(file) for file in files]
    with watched(progress, f"downloading {name}") as advance:
        transfer.run(folder.name, patterns, lambda done: advance(min(here + done, total), total))
        advance(total, total)


def _single_file(name: HubName, sizes: dict[str, int]) -> str:
    """The one file of weights of a repository without an index, by the rule of a folder."""
    if SINGLE_NAME in sizes:
        return SINGLE_NAME
    found = sorted(
        path
        for path in sizes
        if path.endswith(".safetensors") and "/" not in path and not path.startswith(_OTHER_WEIGHTS)
    )
    if len(found) == 1:
        return found[0]
    if found:
        shown = ", ".join(map(repr, found[:4])) + (", ..." if len(found) > 4 else "")
        raise CheckpointError(
            f"model={str(name)!r} has {len(found)} safetensors files ({shown}) and no {INDEX_NAME} that says which "
            f"belong together; download those of one model into a folder, as {SINGLE_NAME}, and give the folder"
        )
    if pickles := sorted(path for path in sizes if path.endswith(PICKLE_SUFFIXES)):
        raise UnsupportedModelError(
            f"model={str(name)!r} has its weights as pickle only ({pickles[0]!r}), which can run code and is never "
            "read; take a repository or a revision with safetensors, or convert it with transformers' save_pretrained"
        )
    raise _without(name, "*.safetensors file", sizes)


def _without(name: HubName, file: str, sizes: dict[str, int]) -> CheckpointError:
    if ggufs := sorted(path for path in sizes if path.endswith(".gguf")):
        remedy = f"download one of its GGUF files (hf download {name.repository} {ggufs[0]!r}) and give that file"
    else:
        remedy = "it is no model for gapless; take the repository that holds the model itself"
    return CheckpointError(f"model={str(name)!r} has no {file}; {remedy}")


def _sizes_by_path(name: HubName, commit: str) -> dict[str, int]:
    """Every file of a commit, with its size in bytes."""
    # Imported on first use, here and below: a local model must not pay for, or depend on, the hub client.
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:  # the client itself tries this again and again
        listed = HfApi().list_repo_tree(name.repository, recursive=True, revision=commit)
        return {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    except Exception as error:
        raise hub_failure(name.repository, name.revision, error) from error


class _StoppedError(Exception):
    """Ends the client's threads when nobody waits for them any more."""


class _Transfer:
    """Calls of the hub client for files, one at a time, followed and stopped from the thread that wants them.

    The client waits for its own threads whatever happens, so it is called on a thread of ours: an interrupt then
    reaches the waiting thread, which has the others end instead of finishing gigabytes first.
    """

    def __init__(self, name: HubName) -> None:
        self._name = name
        self._stopped = threading.Event()
        self._done_bytes = 0  # Written by the client's threads: the count of whichever bar is furthest.

    def run(self, revision: str | None, patterns: Sequence[str], on_bytes: Callable[[int], None]) -> Path:
        """Bring the files that match into the cache; ``on_bytes`` is told on this thread how many have come."""
        self._done_bytes = 0
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._with_another_try, revision, patterns)
            try:
                while not wait((future,), timeout=_TELL_INTERVAL_S).done:
                    on_bytes(self._done_bytes)
            except BaseException:
                self._stop(future)
                raise
            return future.result()

    def _with_another_try(self, revision: str | None, patterns: Sequence[str]) -> Path:
        """Ask the hub, and once more if what went wrong may pass."""
        for tries_left in reversed(range(_TRIES)):
            try:
                return self._snapshot(revision, patterns)
            except Exception as error:  # The client raises its own, its HTTP library's, OSError and ValueError.
                if tries_left == 0 or self._stopped.is_set() or not may_pass(error):
                    raise hub_failure(self._name.repository, self._name.revision, error) from error
                logger.warning("%s: %s; trying again in %.0f s", self._name, reason_of(error), _PAUSE_S)
                self._stopped.wait(_PAUSE_S)
        raise AssertionError("the last try returns or raises")

    def _snapshot(self, revision: str | None, patterns: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self._name.repository,
                revision=revision,
                allow_patterns=list(patterns),
                tqdm_class=self._bar_class(),
            )
        )

    def _bar_class(self) -> Any:
        """The client's own bar, unseen: it counts for us, and ends its thread when we have stopped."""
        from huggingface_hub.utils.tqdm import tqdm

        transfer = self

        class Bar(tqdm):
            def __init__(self, *arguments: Any, **options: Any) -> None:
                options["disable"] = True
                self._counted = 0.0 if options.get("unit") == "B" else None
                super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> Any:
                if transfer._stopped.is_set():
                    raise _StoppedError
                if self._counted is not None:
                    self._counted += n or 0
                    transfer._done_bytes = max(transfer._done_bytes, int(self._counted))
                return super().update(n)

        return Bar

    def _stop(self, future: "Future[Path]") -> None:
        """Have the client's threads end: those that wait for bytes lose their connections."""
        from huggingface_hub import close_session

        self._stopped.set()
        while not wait((future,), timeout=_TELL_INTERVAL_S).done:
            close_session()
