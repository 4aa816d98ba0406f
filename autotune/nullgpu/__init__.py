"""Null GPUs: PyTorch's own CUDA build on a machine without a GPU, over a library whose kernels do nothing.

``README.md`` says what is faked on purpose and what is not. :func:`environment` gives the environment of a process that
finds null GPUs; ``python -m autotune.nullgpu -- COMMAND`` runs one.
"""

from autotune.nullgpu.devices import NullDevice, listed, null_device
from autotune.nullgpu.environment import environment

__all__ = ["NullDevice", "environment", "listed", "null_device"]
