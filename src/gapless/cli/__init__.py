"""The command line: ``gapless generate``, ``chat`` and ``doctor``."""
