"""Benchmarks that need a CUDA device: its tests, its allocator, predictions against measurements, and searches."""
