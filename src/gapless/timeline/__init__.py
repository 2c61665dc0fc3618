"""Seeing where the device's time goes."""
