"""Null GPUs: PyTorch's own CUDA build on a machine without a GPU, over a library whose kernels do nothing.

``README.md`` lists what is faked, and what is as on a GPU. :func:`autotune.nullgpu.environment.environment` gives the
environment of a process that finds null GPUs; ``python -m autotune.nullgpu -- COMMAND`` runs one. The Python of a
training, which need not have autotune's requirements, builds the library: importing this package imports none of them.
"""
