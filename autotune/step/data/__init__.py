"""Loads, checks and profiles the user's dataset, tokenised by TRL's own trainer."""
