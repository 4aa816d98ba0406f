"""Searches: an Optuna study of probes that finds, attributes and confirms a winner, and a search by traces."""
