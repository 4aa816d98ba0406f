"""Traces of whole candidates against the training step that PyTorch's CUDA build runs on a null GPU."""
