"""Tests of what a dry run does to the rows of a script, which need no PyTorch for CUDA."""
