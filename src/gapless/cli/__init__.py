"""The command line: ``gapless generate``, ``chat``, ``serve``, ``bench``, ``timeline`` and ``doctor``."""
