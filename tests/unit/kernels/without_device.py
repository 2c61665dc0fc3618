"""A driver for Triton that has no device: kernels are compiled for Hopper, and launches are noted."""

from typing import Any, ClassVar

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher


class NotingLauncher(CudaLauncher):
    """Stands for the launcher that Triton compiles: notes what it is called with."""

    launches: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, src: Any, metadata: Any) -> None:
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
        self.num_loaded = 0

    def get_current_device(self) -> int:
        """The one that there is not."""
        return 0

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
        self.num_loaded += 1
        return 1, 1000 + self.num_loaded, 32, 0, 1024
