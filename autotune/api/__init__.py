"""The public functions and results: typed signatures in front of :mod:`autotune.app`."""
