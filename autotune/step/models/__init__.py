"""Loads models from their source, with random weights, shrunken, or with fewer layers."""
