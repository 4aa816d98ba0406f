"""Benchmarks of ``autotune check``."""
