"""Text on its way in and out: tokenizers, chat templates and incremental detokenisation."""
