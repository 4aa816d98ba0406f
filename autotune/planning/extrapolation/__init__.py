"""Extrapolates traces of few layers to the whole model, moment by moment."""
