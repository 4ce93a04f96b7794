"""Ringfence: the place where AI agents run.

Packages, from the top down (imports point downwards only; import-linter proves it):
``cli`` > ``node`` > ``runtimes`` > ``guest`` > ``model``; ``conformance`` sits beside ``cli``.
"""

__version__ = "0.1.0"
