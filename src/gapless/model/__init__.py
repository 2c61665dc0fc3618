"""From step inputs to logits: the model families, their checkpoints and the KV cache tensors."""
