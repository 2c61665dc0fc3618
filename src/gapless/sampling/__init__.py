"""Choosing tokens from logits, on the device."""
