"""Figures at one depth and size from traces at others: affine in layers, piecewise in tokens, moment by moment."""
