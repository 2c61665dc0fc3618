"""Measuring the engine: workloads that repeat exactly, depths side by side, and what the numbers say."""
