"""Searches that are replayed from a table of recorded probes."""
