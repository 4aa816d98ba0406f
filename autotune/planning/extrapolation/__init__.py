"""Extrapolates traces to other depths and sizes: affine in layers, piecewise in tokens, moment by moment."""
