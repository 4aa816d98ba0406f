"""The public functions and results: signatures, checked by ``mypy``, in front of :mod:`autotune.app`."""
