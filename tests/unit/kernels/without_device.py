"""A driver for Triton that has no device: kernels are compiled for Hopper, and launches are noted."""

import threading
from typing import Any, ClassVar

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher


class NotingLauncher(CudaLauncher):
    """Stands for the launcher that Triton compiles: notes what it is called with."""

    launches: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, src: Any, metadata: Any) -> None:
        self.made_by = threading.get_ident()
        self.num_ctas = metadata.num_ctas
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid = metadata.launch_cooperative_grid
        self.launch_pdl = metadata.launch_pdl

    def launch(self, *args: Any) -> None:
        """Note a launch; the hook is called as the compiled launcher would."""
        self.launches.append(args)
        enter, metadata = args[11], args[10]
        if enter is not None:
            enter(metadata)


class NoDevice:
    """What Triton asks of a driver."""

    launcher_cls = NotingLauncher
    STREAM = 7

    def __init__(self) -> None:
        self.utils = self
        self.loaded_on: list[int] = []
        self._of_thread = threading.local()

    def get_current_device(self) -> int:
        """This thread's; none of them is there."""
        number: int = getattr(self._of_thread, "number", 0)
        return number

    def set_current_device(self, number: int) -> None:
        """For this thread."""
        self._of_thread.number = number

    def get_current_stream(self, device: int) -> int:
        """A number that launches can be told by."""
        return self.STREAM

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What limits a kernel."""
        return {"max_shared_mem": 227 << 10}

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        """A module, a function (another one each time), registers, spills, most threads."""
        self.loaded_on.append(args[-1])
        return 1, 1000 + len(self.loaded_on), 32, 0, 1024
