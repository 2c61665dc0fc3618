"""Opening the GPU while Python imports torch: :func:`open_gpu`.

The driver needs some tenths of a second to start and to make a context. Both are C calls without Python's lock, and
the context is the process's primary one, which torch takes as it finds it. So a thread makes them meanwhile, by the
driver's own interface, and nobody waits for it: where it is late, torch's first call waits inside the driver.
"""

import ctypes
import threading

__all__ = ["open_gpu"]

_DRIVER = "libcuda.so.1"
_FIRST_VISIBLE = 0


def open_gpu() -> threading.Thread:
    """Begin to open the first visible GPU, on a thread of its own; without a GPU or its driver it ends at once.

    Faults are left to torch, which meets them again and has words for them.
    """
    thread = threading.Thread(target=_open, name="gapless-open-gpu", daemon=True)
    thread.start()
    return thread


def _open() -> None:
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # 0 is success. The context is never released: it lives as long as the process, as torch's would.
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), _FIRST_VISIBLE) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
