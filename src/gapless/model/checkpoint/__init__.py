"""Reading checkpoints: a folder of safetensors, a GGUF file, a model of the hub, or a shape, behind one description.

A checkpoint is untrusted input. Its headers are checked by our own code before any other library opens the file,
pickles are refused, and Python code that lies in a model's folder is never imported.
"""

from gapless.model.checkpoint.base import Checkpoint, LoadFormat, ProgressCallback, TokenizerSource, WeightSource
from gapless.model.checkpoint.opening import open_checkpoint
from gapless.model.checkpoint.presets import PRESET_NAMES
from gapless.model.checkpoint.progress import LoadStage, NoProgress, Progress

__all__ = [
    "PRESET_NAMES",
    "Checkpoint",
    "LoadFormat",
    "LoadStage",
    "NoProgress",
    "Progress",
    "ProgressCallback",
    "TokenizerSource",
    "WeightSource",
    "open_checkpoint",
]
