"""The simulation: the real engine over seeded queues and a model that notices every wrong block and token.

``python -m simulation --seeds N`` runs it; see :mod:`simulation.harness`.
"""
