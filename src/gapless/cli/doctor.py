"""``gapless doctor``: what gapless finds on this machine, and whether it works.

The last check is a real one: a small model with random weights answers on each device.
"""

from gapless.cli.console import reported
from gapless.cli.options import VerboseOption
from gapless.errors import GaplessError

__all__ = ["doctor"]


class BrokenInstallationError(GaplessError):
    """A device is there and does not work."""


def doctor(*, verbose: VerboseOption = False) -> None:
    """Show versions, devices, memory, kernels and models, and try each device."""
    with reported(verbose=verbose, quiet=True):
        # Not above: it imports torch, for which `gapless --help` should not have to wait.
        from gapless.cli.findings import findings, try_device, usable_devices
        from gapless.engine.assembly import resolve_device

        for finding in findings():
            print(f"{finding.name:<12}{finding.value}", flush=True)
        broken = []
        for device in usable_devices():
            finding = try_device(device)
            print(f"{finding.name:<12}{finding.value}", flush=True)
            if not finding.works:
                broken.append(device)
        if "cuda" in broken:
            resolve_device("cuda")  # a GPU that is refused for what it is has a better last line than ours
        if broken:
            raise BrokenInstallationError(f"{' and '.join(broken)} cannot be used: the reason is above")
