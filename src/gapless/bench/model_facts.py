"""What is known of a model before its weights are loaded: :func:`read_model_facts`. Pure, apart from reading files."""

from dataclasses import dataclass

from gapless.model.checkpoint import LoadFormat, TokenizerSource, open_checkpoint
from gapless.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ModelFacts", "read_model_facts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """A model's sizes, and where its tokenizer is.

    Attributes:
        context: positions that its configuration states.
    """

    vocab_size: int
    context: int
    eos_token_ids: frozenset[int]
    tokenizer_source: TokenizerSource

    def load_tokenizer(self) -> Tokenizer:
        """Load its tokenizer; raises :class:`~gapless.errors.CheckpointError` if there is none."""
        return load_tokenizer(self.tokenizer_source, vocab_size=self.vocab_size)


def read_model_facts(model: str, load_format: LoadFormat) -> ModelFacts:
    """Open a model's checkpoint and read its configuration.

    Raises:
        CheckpointError: there is no such model or preset, or it is damaged.
        UnsupportedModelError: it needs something gapless does not have, by name.
    """
    checkpoint = open_checkpoint(model, load_format=load_format)
    spec = checkpoint.spec
    return ModelFacts(
        vocab_size=spec.vocab_size,
        context=spec.max_position_embeddings,
        eos_token_ids=checkpoint.eos_token_ids,
        tokenizer_source=checkpoint.tokenizer_source,
    )
