"""The benchmarks are scripts, not a package: their folder goes on the path, as it does when one of them is run."""

import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parents[3] / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))
