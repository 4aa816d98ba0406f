"""Traces of whole candidates against the training step of PyTorch's CUDA build on a null GPU."""
