"""The model families gapless runs, by architecture name."""

from gapless.model.families.family import Family, FamilyTraits
from gapless.model.families.llama import LLAMA
from gapless.model.families.mistral import MISTRAL
from gapless.model.families.qwen2 import QWEN2
from gapless.model.families.qwen3 import QWEN3

__all__ = ["FAMILIES", "Family", "FamilyTraits"]

FAMILIES: dict[str, Family] = {family.architecture: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
