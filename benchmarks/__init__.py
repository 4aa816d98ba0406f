"""Measurements of autotune itself: what it costs, and how far its predictions are from what happens."""
