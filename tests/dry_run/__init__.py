"""Tests of the row order in a dry run, which need no PyTorch for CUDA."""
