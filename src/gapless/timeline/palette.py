"""The timeline's colours, chosen so that people with colour-blindness tell them apart.

From Okabe and Ito, "Color Universal Design" (2008), and the muted scheme of Paul Tol, "Colour Schemes" (SRON technical
note 09-002). What matters is told by words or patterns too.
"""

from gapless.timeline.idle import IdleCause
from gapless.timeline.spans import HostPhase

__all__ = ["ASLEEP", "BUSY", "IDLE", "IDLE_CAUSES", "PHASES", "TEXT", "WEAK_TEXT", "buffers_colour"]

BUSY = "#009E73"
IDLE = "#D55E00"
ASLEEP = "#E3E6EA"
TEXT = "#1F2933"
WEAK_TEXT = "#52606D"

PHASES = {
    HostPhase.SCHEDULE: "#332288",
    HostPhase.WRITE: "#44AA99",
    HostPhase.ENQUEUE: "#882255",
    HostPhase.WAIT: "#E3E6EA",
    HostPhase.APPLY: "#999933",
}
# What a phase of the host's causes has that phase's colour.
IDLE_CAUSES = {
    IdleCause.SCHEDULE: PHASES[HostPhase.SCHEDULE],
    IdleCause.WRITE: PHASES[HostPhase.WRITE],
    IdleCause.ENQUEUE: PHASES[HostPhase.ENQUEUE],
    IdleCause.RESULTS: "#88CCEE",
    IdleCause.APPLY: PHASES[HostPhase.APPLY],
    IdleCause.HOST_OTHER: "#CC6677",
    IdleCause.INPUTS: "#117733",
    IdleCause.LAUNCH: "#DDCC77",
    IdleCause.NO_WORK: ASLEEP,
}
_BUFFERS = ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442", "#8C8C8C")


def buffers_colour(buffers: int) -> str:
    """Of a set of step buffers; sets beyond the sixth share colours, and are told apart by their letter."""
    return _BUFFERS[buffers % len(_BUFFERS)]
