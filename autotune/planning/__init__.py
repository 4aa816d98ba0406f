"""Estimates training plans from traces at their own micro-batch sizes; only depth is extrapolated."""
