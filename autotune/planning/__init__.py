"""Estimates every candidate from a few traces: extrapolates to any depth and shape, and adds effects of techniques."""
