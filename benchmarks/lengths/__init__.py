"""Benchmarks of ``autotune lengths``."""
