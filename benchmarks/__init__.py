"""Measurements of autotune itself: its cost, and the errors of its predictions."""
