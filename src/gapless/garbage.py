"""Python's collector of reference cycles kept out of what it would disturb: :func:`without_garbage_collection`.

The idea: a cycle may hold tensors or CUDA graphs of an engine that is gone. To let go of them in the middle of a
capture or of a measurement of memory breaks it, and when the collector runs is chance. Keeps no state of its own.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_garbage_collection"]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No cycle of objects is collected in this process, by any thread, until the end of the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
