"""Benchmarks of the study that workers share."""
