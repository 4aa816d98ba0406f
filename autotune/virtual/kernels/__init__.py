"""Workspaces and allocations of kernels on a GPU and on a CPU."""
